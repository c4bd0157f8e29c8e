"""The attention kernels of sm_90 and sm_100 without such a chip: calls that they support, tensor maps of heads, and the
schedule of their work."""

import warnings

import pytest
import torch
import triton
import triton.language as tl

from fasttfm.kernels import jit, tensor_map
from fasttfm.kernels.attention import blackwell, launch
from fasttfm.kernels.attention.hopper import forward, rule
from fasttfm.kernels.attention.hopper.schedule import NOWHERE, place, turns
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.tiles.table import Tile


def made(layout, batch=2, heads=3, rows=32, width=64):
    """(B, H, L, D) with elements equal to their index in memory."""
    shape, order = {
        "heads last": ((batch, rows, heads, width), (0, 2, 1, 3)),
        "heads first": ((batch, heads, rows, width), (0, 1, 2, 3)),
        "positions first": ((rows, batch, heads, width), (1, 2, 0, 3)),
        "one of three": ((batch, rows, heads, 3, width), (0, 2, 1, 3)),
    }[layout]
    size = torch.Size(shape).numel()
    x = torch.arange(size).view(shape)
    return (x[..., 1, :] if layout == "one of three" else x).permute(order)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("size", [{}, {"batch": 1}, {"heads": 1}, {"batch": 1, "heads": 1}])
@pytest.mark.parametrize("layout", ["heads last", "heads first", "positions first", "one of three"])
def test_a_tensor_map_has_every_row_of_every_head(layout, size, spread):
    x = made(layout, **size)
    heads = rule.heads_of(x)
    shape, strides, _ = (heads.spread if spread else heads.mapped)(32, 64)
    mapped = torch.as_strided(x, shape, strides)
    assert mapped.max() <= x.max()  # nothing out of bounds
    per_batch, per_head, column = heads.origin
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            rows = mapped[b * per_batch + h * per_head, ..., h * column : h * column + 64]
            if spread:  # (pair, block, half): keys of a block by pairs
                rows = rows.permute(1, 0, 2, 3).reshape(32, 64)
            assert torch.equal(rows, x[b, h])


def test_a_packed_tensor_is_one_plane_and_unaligned_strides_have_no_map():
    packed = torch.zeros(40, 2, 64, dtype=torch.bfloat16).transpose(0, 1).expand(5, -1, -1, -1)
    assert rule.heads_of(packed).planes == 1
    x = torch.zeros(2, 9, 2, 72, dtype=torch.bfloat16).transpose(1, 2)
    assert rule.heads_of(x[..., :64]) is not None
    assert rule.heads_of(x[..., 4:68]) is None  # starts 8 bytes after a multiple of 16
    assert rule.heads_of(torch.zeros(2, 9, 2, 68, dtype=torch.bfloat16).transpose(1, 2)[..., :64]) is None
    assert rule.heads_of(torch.zeros(2, 3, 4, 9, 64, dtype=torch.bfloat16)[:, :2, 0]) is None
    assert rule.heads_of(x[..., ::2]) is None


@pytest.mark.parametrize(
    ("taken", "changed"),
    [
        (True, {}),
        (True, {"causal": True, "causal_offset": 3, "key_lengths": torch.tensor([3, 4])}),
        (True, {"dropout_p": 0.1, "seed": torch.tensor([1])}),
        (True, {"keys": 45}),
        (False, {"keys": 45, "dropout_p": 0.1, "seed": torch.tensor([1])}),  # a partial Philox block
        (False, {"mask": torch.zeros(2, 2, 33, 48, dtype=torch.bool)}),
        (False, {"softcap": 2.0}),
        (True, {"window": 5, "causal": True}),
        (False, {"sinks": torch.zeros(2)}),
        (False, {"offsets": torch.tensor([1, 2]), "causal": True}),
        (False, {"dtype": torch.float32}),
        (True, {"width": 256}),
        (True, {"width": 96}),
        (False, {"width": 32}),
        (False, {"chip": "sm_80"}),
        (False, {"chip": "sm_100"}),
        (True, {"chip": "sm_100", "of": "sm_100"}),
        (False, {"chip": "sm_100", "of": "sm_100", "width": 256}),
        (False, {"chip": "sm_100", "of": "sm_100", "width": 96}),
        (False, {"triton": (3, 6)}),
    ],
)
def test_the_rule_accepts_the_calls_that_the_kernels_support(taken, changed, monkeypatch):
    chosen = {"keys": 48, "dtype": torch.bfloat16, "width": 64, "chip": "sm_90", "triton": (3, 7), "of": "sm_90"}
    options = {name: value for name, value in changed.items() if name not in chosen}
    keys, dtype, width, chip, triton, of = (changed.get(name, value) for name, value in chosen.items())
    monkeypatch.setattr(launch, "chip", lambda device: CHIPS[chip])
    monkeypatch.setattr(rule, "interpreted", lambda: False)
    monkeypatch.setattr(tensor_map, "compiler", lambda: triton)
    query, key = (torch.zeros(2, rows, 2, width, dtype=dtype).transpose(1, 2) for rows in (33, keys))
    assert rule.takes(launch.prepare(query, key, key, **options), chip=of) == taken


@pytest.mark.parametrize(("module", "rows"), [(forward, 128), (blackwell, 256)])
def test_calls_of_other_lengths_use_the_compiled_kernel(module, rows, monkeypatch):
    keys = []
    out, lse = torch.zeros(3, 256, 2, 64, dtype=torch.bfloat16).transpose(1, 2), torch.zeros(3, 2, 256)
    monkeypatch.setattr(
        rule, "Launch", lambda kernel, grid, constants: lambda *args: keys.append(jit._key(kernel, args, constants))
    )
    for batch, queries, count in ((2, 256, 208), (3, 37, 1008), (1, 1, 16)):
        query, key = (torch.zeros(batch, n, 2, 64, dtype=torch.bfloat16).transpose(1, 2) for n in (queries, count))
        call = launch.prepare(query, key, key, causal=True, dropout_p=0.1, seed=torch.tensor([1]))
        module.Forward(call, Tile(rows, 128, 4, 2), out, lse)(*call.inputs, out, lse, call.problem)
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_a_tensor_map_that_the_driver_rejects_falls_back_with_one_warning():
    computed = []

    def rejected(*arguments):
        raise RuntimeError("Triton Error [CUDA]: invalid argument")

    attempt = rule.Attempt(rejected, lambda *arguments: computed.append(arguments))
    with pytest.warns(RuntimeWarning, match="invalid argument") as caught:
        attempt(1, 2)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attempt(3, 4)
    assert computed == [(1, 2), (3, 4)]


def test_the_failure_of_an_earlier_kernel_is_not_taken_for_a_rejected_tensor_map():
    def failed(*arguments):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        rule.Attempt(failed, lambda *arguments: pytest.fail("the fallback ran"))(1, 2)


# -------------------------------------------------------------------------------------------------------- schedule


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
