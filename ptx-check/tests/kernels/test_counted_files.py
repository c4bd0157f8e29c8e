"""`ptx-check ledger` on files that launch Triton kernels, and on the cubins of a library."""

import re

import pytest

from ptx_check.__main__ import main

SOURCE = """
import torch, triton, triton.language as tl
from ptx_check import executed

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < n
        total += tl.exp(tl.load(x + at, mask=inside, other=0.0)) * tl.load(y + at, mask=inside, other=0.0)
    tl.store(out + tl.arange(0, BLOCK), total)

"""
LAUNCHED = """
x = torch.ones(5000)
add[(5,)](x, x, x, 5000, BLOCK=1024)
assert x[0] == 3, 'not computed'
torch.testing.assert_close(x, x + 1)
add[(1,)](x, x, x, 9, BLOCK=16)
"""
EXECUTED = """
with executed("sm_90") as machine:
    x = torch.ones(5000, device="cuda")
    add[(5,)](x, x, x, 5000, BLOCK=1024)
assert not machine.faults
"""


def counts(capsys, *words) -> list[list[str]]:
    """The cells of each line, the head's first."""
    assert main(["ledger", *map(str, words)]) == 0
    return [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]


def test_the_kernels_that_a_file_launches_are_counted(tmp_path, capsys):
    """Checks of numbers that nothing computes are left out."""
    file = tmp_path / "mine.py"
    file.write_text(SOURCE + LAUNCHED)
    head, *lines = counts(capsys, file, "--chips", "sm_60,sm_80,gfx942")
    assert "latency" in head
    assert {cells[0].split()[1] for cells in lines} == {"BLOCK=1024", "BLOCK=16"}
    loops = [cells for cells in lines if cells[2] == "1" and "BLOCK=1024" in cells[0]]
    assert [cells[:2] for cells in loops] == [
        ["add BLOCK=1024 num_warps=4 num_stages=3", "sm_60"],
        ["add BLOCK=1024 num_warps=4 num_stages=3", "sm_80"],
        ["add BLOCK=1024 num_warps=4 num_stages=2", "gfx942"],
    ]
    assert [cells[head.index("mufu")] for cells in loops[:2]] == ["4.0", "8.0"]  # an exponential an element


@pytest.mark.parametrize("named", ["", "sm_86,gfx942"])
def test_a_file_that_executes_is_counted_for_its_chip_or_those_that_are_named(tmp_path, capsys, named):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE + EXECUTED)
    _, *lines = counts(capsys, file, *(("--chips", named) if named else ()))
    assert sorted({cells[1] for cells in lines}) == (sorted(named.split(",")) if named else ["sm_90"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = (", "cannot be read as Python"),
        ("import sys; sys.exit(3)", "ended with SystemExit(3)"),
        ("x = 1", "launches no Triton kernel"),
    ],
)
def test_files_that_hold_no_kernel_end_in_a_line(tmp_path, capsys, text, told):
    file = tmp_path / "a.py"
    file.write_text(text)
    assert main(["ledger", str(file), "--chips", "sm_80"]) == 1
    assert told in capsys.readouterr().err
