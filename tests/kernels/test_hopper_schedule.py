"""Every tile of every head belongs to exactly one program, and the load is balanced."""

import pytest
import torch
import triton
import triton.language as tl

from fasttfm.kernels.attention.hopper.schedule import NOWHERE, place, turns


@triton.jit
def _list(rows, planes, tiles, count, section, programs):
    for number in range(turns(tiles, count, section, programs)):
        row, plane = place(number, tiles, count, section, programs, 128)
        tl.store(rows + number, row)
        tl.store(planes + number, plane)


def numbers(tiles, planes, section, programs):
    """(first row, plane) of every turn, in order."""
    rows, heads = (torch.full((4 * planes * (tiles + programs),), -1, dtype=torch.int32) for _ in range(2))
    _list[(1,)](rows, heads, tiles, planes, section, programs)
    return list(zip(rows[rows >= 0].tolist(), heads[rows >= 0].tolist(), strict=True))


@pytest.mark.parametrize(
    ("tiles", "planes", "section", "programs"),
    [(8, 16, 16, 11), (5, 13, 4, 6), (1, 3, 1, 7), (3, 10, 6, 1), (7, 9, 3, 20), (16, 24, 6, 16)],
)
def test_every_tile_of_every_head_belongs_to_one_program(tiles, planes, section, programs):
    turns = numbers(tiles, planes, section, programs)
    assert len(turns) % programs == 0
    works = [(row // 128, plane) for row, plane in turns if row != NOWHERE.value]
    assert sorted(works) == [(t, h) for t in range(tiles) for h in range(planes)]
    assert [h // section for _, h in works] == sorted(h // section for _, h in works)


def test_the_load_of_programs_is_balanced():
    load = [0] * 13
    for number, (row, _) in enumerate(numbers(16, 20, 10, len(load))):
        load[number % len(load)] += 0 if row == NOWHERE.value else row // 128 + 1
    assert max(load) * len(load) <= 1.02 * sum(load)  # 1.05 with a fixed order of programs
