"""The PTX of every kernel family, forward and backward, executed on a CPU and compared with reference.py.

Tiles are the shipped ones of each chip. `make test` takes some of EVERYWHERE, because compiling is slow; `make
test-all` takes all of them on every chip, and each larger problem once, with dtypes in turn; `make executed` takes
everything on every chip in every dtype.
"""

import dataclasses
import itertools

import keep_mask
import pytest
import torch
import triton.language as tl
from executing import CHIPS, append, assert_as_accurate, check, decode
from gpu.problems import (
    PROBLEMS,
    _attention,
    _cross_entropy,
    _embed,
    _feed_forward,
    _norms,
    _packed,
    _packed_qkv,
    _rms_norm,
    _rotary,
    _weights,
)
from search_step import a_step, attend, specified

from fasttfm import reference
from fasttfm.kernels import chip as chips
from fasttfm.kernels import masked_softmax, product
from fasttfm.kernels.attention import backward as attention_backward
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.proof.executed import executed
from fasttfm.kernels.tiles.table import Tile
from fasttfm.reference_cache import attention_with_cache

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LONGEST = 600
"""Most keys of a row in `make test`."""

SCORED = {"causal": "bottom_right", "window": (50, 0), "softcap": 2.0, "slopes": True, "sinks": True}
EVERYWHERE = [
    # short rows, then rows longer than the short route takes on any chip; without mask, with a boolean or additive one
    _attention(2, 1, 13, 27, 64, 64, lengths=[27, 0], p=0.1),
    _attention(1, 2, 11, 29, 64, 64, mask="bool", p=0.1),
    _attention(1, 1, 11, 29, 64, 64, mask="add", causal=True),
    _attention(1, 1, 37, 139, 64, 64, causal=True, p=0.1),
    _attention(1, 1, 37, 139, 64, 64, mask="bool", p=0.1),
    _attention(1, 1, 37, 139, 64, 64, mask="add", lengths=[131]),
    _packed([0, 13, 13, 20], [0, 5, 20, 41], 1, 64, causal=False),
    _packed([0, 35, 38], [0, 141, 147], 1, 64, causal=True),
    _attention(2, 2, 11, 29, 64, 64, window=(9, 3), softcap=2.0, slopes=True, sinks=True, key_heads=1, p=0.1),
    _attention(2, 1, 37, 160, 64, 64, **SCORED, lengths=[159, 60], p=0.1),
    _packed_qkv(1, 21, None, 1, 64, causal=True),
    _weights(1, 1, 7, 45, 64),
    _rotary(2, 3, 19, 40, 32, interleaved=False),
    _rotary(1, 2, 11, 64, 64, interleaved=True),
    *_norms(7, 520, 0.1),
    _rms_norm(7, 520, 0.1),
    _feed_forward(37, 40, 72, 0.1),
    _feed_forward(37, 40, 72, 0.1, "gelu"),
    _feed_forward(33, 24, 40, 0.0, "gelu_tanh"),
    _feed_forward(33, 24, 40, 0.1, "silu"),
    *_cross_entropy(13, 24, 300),
    _embed(2, 7, 72, 50, 0.1),
]
"""Small problems of odd sizes."""


def taking_turns(problems, chips):
    """Each problem on every chip, with dtypes in turn."""
    return [(p, chip, list(DTYPES)[(i + j) % 3]) for i, p in enumerate(problems) for j, chip in enumerate(chips)]


def on(chip, dtypes, *problems):
    return [(p, chip, dtype) for p in problems for dtype in dtypes]


ONCE = [(p, CHIPS[i % 4], list(DTYPES)[(i + i // 4) % 3]) for i, p in enumerate(PROBLEMS) if p.keys <= LONGEST]
SMALL = [*taking_turns(EVERYWHERE, (*CHIPS, "sm_120")), *taking_turns(EVERYWHERE, ("sm_100",))]
UNEVEN = [
    *(_attention(1, 1, 37, 139, *widths) for widths in ((40, 64), (72, 128), (128, 72), (200, 256))),
    *(_attention(1, 1, 37, 139, *widths, p=0.1) for widths in ((72, 128), (200, 256))),
    *(_attention(1, 1, 37, 139, *widths, mask="add") for widths in ((40, 64), (72, 128))),
]
ALIGNED_MASKS = [
    _attention(1, 1, 70, 320, 64, 64, mask="add", p=0.1),
    _attention(1, 1, 150, 208, 64, 64, mask="bool", causal="bottom_right"),
    _attention(1, 1, 70, 208, 128, 128, mask="bool", p=0.1),
    _attention(1, 1, 70, 320, 128, 128, mask="add", lengths=[250]),
]
"""With rows of multiples of 16 elements, which are loaded 16 bytes at a time, and copied asynchronously."""
SPECIAL = [
    # Triton up to 3.7 computes wrong products of 16-deep tiles that depend on an 8-bit load (triton#11691)
    *on("sm_80", ["bf16", "fp16"], *(_attention(1, 1, keys, keys, 64, 64, mask="bool", p=0.1) for keys in (16, 30))),
    # forward reads a key head four times; backward accumulates four query heads in registers
    *on("sm_80", ["bf16"], _attention(1, 4, 19, 27, 64, 64, key_heads=1, causal=True, p=0.1)),
    *on("sm_90", ["bf16"], _attention(1, 4, 19, 139, 64, 64, key_heads=1, causal=True, p=0.1)),
    # keys or values aligned: with several stages the compiler copies only those asynchronously, and fences too early
    *on("sm_90", ["bf16"], *UNEVEN),
    *on("sm_100", ["fp16"], *UNEVEN),
    *((p, chip, "bf16") for chip in ("sm_80", "sm_90", "sm_100", "sm_120") for p in ALIGNED_MASKS),
]
EVERYTHING = itertools.product(EVERYWHERE + [p for p in PROBLEMS if p.keys < 9000], (*CHIPS, "sm_100"), DTYPES)
REST = [
    *(case for case in EVERYTHING if case not in SMALL + ONCE),
    # a chip with the instructions of an older one
    *on("sm_120", ["bf16"], *[p for p in PROBLEMS if p.keys < 9000][::3]),
    # tiles that nothing above enters
    *on("sm_90", ["bf16"],
        _attention(1, 1, 100, 150, 256, 256, causal=True), _attention(1, 1, 30, 30, 128, 128, causal=True, p=0.1),
        _attention(1, 4, 37, 139, 40, 64, key_heads=2, causal=True, p=0.1)),
    # a few rows of each width with a tile of its own
    *on("sm_90", ["fp32", "bf16"], *(p for N in (100, 200, 300, 900, 2000, 4000, 8000) for p in _norms(3, N, 0.1))),
    *on("sm_90", ["fp16", "bf16"],
        *(_weights(1, 1, 3, S, 16) for S in (16, 30, 60, 100, 200, 400, 900, 2000, 4000, 8000))),
    *on("sm_90", DTYPES,
        *(p for V in (900, 2000, 4000, 9000) for p in _cross_entropy(3, 24, V)),
        *(_embed(1, 5, N, 50, 0.1) for N in (50, 100, 200, 400)),
        *(_rotary(1, 1, 5, D, D, interleaved=False) for D in (32, 64, 128, 256))),
]  # fmt: skip


def cases(which):
    return pytest.mark.parametrize(
        ("problem", "chip", "dtype"), which, ids=[f"{chip} {dtype} {p}" for p, chip, dtype in which]
    )


@pytest.mark.sample(14)
@cases(SMALL)
def test_kernels_equal_the_reference_without_faults(problem, chip, dtype):
    check(problem, chip, DTYPES[dtype])


@pytest.mark.sample(4)
@cases(SPECIAL)
def test_problems_that_a_fault_once_hid_in(problem, chip, dtype):
    check(problem, chip, DTYPES[dtype])


@pytest.mark.whole
@cases(ONCE)
def test_larger_problems(problem, chip, dtype):
    check(problem, chip, DTYPES[dtype])


@pytest.mark.executed
@cases(REST)
def test_every_kernel_on_every_chip(problem, chip, dtype):
    check(problem, chip, DTYPES[dtype])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("chip", "dtype"), [*zip(("sm_80", "sm_89", "sm_90", "sm_120"), ["bf16"] * 4), ("sm_90", "fp16")]
)
@pytest.mark.parametrize(
    "problem",
    [
        _attention(2, 1, 75, 139, 64, 64, lengths=[130, 0], p=0.1),
        _attention(1, 2, 150, 139, 64, 64, causal=True),
        _attention(1, 4, 70, 139, 64, 40, key_heads=2, causal="bottom_right", p=0.1),
        _packed([0, 35, 38, 150], [0, 141, 147, 200], 2, 64, causal=True),
    ],
    ids=str,
)
def test_the_backward_pass_of_one_launch(problem, chip, dtype, monkeypatch):
    """A program accumulates dQ in memory, where its threads read what others wrote."""
    monkeypatch.setattr(attention_backward, "LAUNCHES", lambda *size: 1)
    machine = check(problem, chip, DTYPES[dtype])
    assert "_backward_heads" in {launch.name for launch in machine.launches}


LONG_ON_SM_90 = [
    (_attention(2, 1, 150, 139, 64, 64, lengths=[130, 0]), "64x64 64x64"),
    (_attention(1, 1, 150, 260, 64, 64, causal=True), "64x64 64x64"),
    (_attention(2, 1, 150, 139, 64, 64, lengths=[130, 0], p=0.1), "64x64 32x64"),
    (_attention(1, 1, 260, 150, 64, 40, causal=True, p=0.1), "64x64 32x64"),
    (_packed([0, 70, 73, 220], [0, 141, 147, 210], 1, 64, causal=True), "64x64 32x64"),
    (_attention(1, 4, 70, 139, 64, 64, key_heads=2, causal="bottom_right", p=0.1), "64x64 32x128"),
    (_attention(2, 1, 150, 139, 128, 128, lengths=[130, 0]), "128x64 32x128"),
    (_attention(1, 1, 139, 150, 128, 72, causal=True, p=0.1), "128x64 32x128"),
    (_attention(1, 4, 70, 139, 128, 128, key_heads=2, causal=True, p=0.1), "128x64 16x128"),
    (_attention(2, 1, 100, 100, 64, 64, lengths=[100, 50], p=0.1), "64x64 64x64"),
    (_attention(1, 1, 128, 65, 64, 64, causal=True, p=0.1), "64x64 64x64"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("problem", "tiles"), LONG_ON_SM_90, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_backward_tiles_of_long_rows_that_were_fastest_on_an_h100(problem, tiles, dtype, monkeypatch):
    """Whole and partial tiles, several pipeline steps, masked and not."""
    taken = []
    options = Tile.options
    monkeypatch.setattr(Tile, "options", lambda tile, *a: taken.append(tile) or options(tile, *a))
    machine = check(problem, "sm_90", DTYPES[dtype])
    assert [launch.name for launch in machine.launches][-2:] == ["_backward_queries", "_backward_keys"]
    assert " ".join(f"{tile.rows}x{tile.columns}" for tile in taken[-2:]) == tiles


PAGES = [(chip, dtype, queries, 40, 8) for chip, dtype, queries in zip(CHIPS, itertools.cycle(DTYPES), (1, 9, 1, 9))]
EVERY_TILE = itertools.product(["sm_90"], DTYPES, (1, 9), (40, 104, 200), (8, 16))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("chip", "dtype", "queries", "width", "narrower"),
    [*PAGES, *(pytest.param(*case, marks=pytest.mark.whole) for case in EVERY_TILE if case not in PAGES)],
)
def test_a_paged_cache_is_read_only_where_the_table_points(chip, dtype, queries, width, narrower):
    """Several shares, uneven pages and heads, invalid pages in the table: no access out of bounds. Rows of values
    `narrower` by 8 are aligned where those of keys are not."""
    table = torch.randperm(24).view(2, 12).int()
    keys, values = (torch.randn(24, 2, 5, size).to(DTYPES[dtype]) for size in (width, width - narrower))
    query = torch.randn(2, 6, queries, width).to(DTYPES[dtype])
    lengths, starts, slopes = torch.tensor([57, 13]), torch.tensor([4, 0]), torch.rand(1, 6)
    scoring = {"slopes": slopes, "softcap": 3.0, "sinks": torch.randn(6), "scale": 0.2}
    new, appended = torch.randn(2, 2, 3, width).to(DTYPES[dtype]), keys.clone()
    with executed(chip) as machine:
        output = decode(query, keys, values, lengths, starts, table, **scoring, left=30, right=0, shares=2)
        append(appended, new, lengths, table * 2 - 9)
        decode(query, keys, values, lengths * 9 - 100, starts, table * 5 - 40, **scoring, left=90, right=0, shares=2)
    assert [launch.name for launch in machine.launches] == ["_decode", "_merge", "_append", "_decode", "_merge"]

    def specified(precision):
        tensors = (x.to(precision) for x in (query, keys, values))
        options = {"cache_lengths": lengths, "cache_starts": starts, "block_table": table}
        options |= {"alibi_slopes": slopes[0], "softcap": 3.0, "sinks": scoring["sinks"], "scale": 0.2}
        return attention_with_cache(*tensors, **options, window=(30, 0))

    assert_as_accurate(output, specified(DTYPES[dtype]), specified(torch.float64))


@pytest.mark.sample(1)
@pytest.mark.parametrize("width", [40, 128, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", [*CHIPS, "sm_100"])
def test_a_beam_search_step_reads_only_its_ancestors(chip, dtype, width):
    """Several iterations over keys, whole and partial; then invalid places and positions."""
    joint, cache, ancestors, positions = given = a_step([139, 64, 0], 2, 2, width, DTYPES[dtype], 140)
    with executed(chip) as machine:
        output, written = attend(*given)
        attend(joint, cache, ancestors * 5 - 400, positions * 9 - 100)
    assert [launch.name for launch in machine.launches] == ["_attend", "_attend"]
    exact, expected = specified(*given)
    assert_as_accurate(output, specified(*given, precision=DTYPES[dtype])[0], exact)
    assert torch.equal(written.nan_to_num(), expected.nan_to_num())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("chip", "dtype"), list(zip(CHIPS, itertools.cycle(DTYPES))))
def test_windows_caps_slopes_and_sinks_between_two_products_of_cublas(chip, dtype, monkeypatch):
    monkeypatch.setattr(attention_launch, "route", lambda *size: "softmax")
    options = {**SCORED, "window": (30, 0)}
    check(_attention(2, 2, 11, 45, 24, 40, **options, lengths=[45, 0], key_heads=1, p=0.1), chip, DTYPES[dtype])


@pytest.mark.executed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [100, 200, 300])
@pytest.mark.parametrize(("activation", "before"), [("relu", "_add_dropped"), ("gelu", "_activate")])
def test_activations_between_two_products_of_cublas_on_sm_90(activation, before, hidden, dtype, monkeypatch):
    monkeypatch.setattr(product, "route_of", lambda *given: "cublas")
    machine = check(_feed_forward(9, 24, hidden, 0.1, activation), "sm_90", DTYPES[dtype])
    assert [launch.name for launch in machine.launches][:2] == [before, "_gate"]


@pytest.mark.executed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_large_tiles_of_products_on_sm_90(activation, dtype, monkeypatch):
    """With few processors, few tiles already make a product large."""
    monkeypatch.setitem(chips.CHIPS, "sm_90", dataclasses.replace(chips.CHIPS["sm_90"], processors=2))
    check(_feed_forward(130, 64, 192, 0.1, activation), "sm_90", DTYPES[dtype])


@pytest.mark.sample(1)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("keys", [16, 45])
def test_an_in_place_softmax_overwrites_nothing_that_another_thread_reads(keys, chip):
    """Duplicate stores of equal values would be a note of the machine, not a fault; there are none."""
    scores = torch.randn(1, 2, 35, keys)
    expected = scores.softmax(-1)
    with executed(chip) as machine:
        p, _ = masked_softmax.Forward(scores, in_place=True)(scores, 1.0)
        grad = torch.randn(1, 2, 35, keys)
        masked_softmax.Backward(p, in_place=True)(grad, p, 1.0)
    assert p.data_ptr() == scores.data_ptr()
    torch.testing.assert_close(p, expected)
    assert not machine.notes


SEED = torch.tensor([0x0123456789ABCDEF])
LAYOUTS = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16, "transposed": "transposed"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_draws_the_references_dropout_mask(chip, layout, columns):
    """By inline PTX, which the interpreter does not run. Without a matrix product the compiler chooses the layout."""
    out = torch.empty((1, 18, 150), dtype=torch.int8)
    for threshold, warps in ((26, 4), (128, 1), (256, 2)):
        with executed(chip):
            keep_mask.write(out, SEED, 3, threshold, LAYOUTS[layout], columns=columns, warps=warps)
        assert torch.equal(out.bool(), reference.keep_mask(out.shape, threshold / 256, SEED, 3))
