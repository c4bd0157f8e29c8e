"""Everyday features of Triton's language, executed and compared with torch: each on a chip in turn in `make test-all`,
on every chip in the command that makes the record (python -m tests.executed)."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from language import CHIPS, FEATURES

from ptx_check import executed

CASES = [(f, chip) for f in FEATURES for chip in CHIPS if f.compiles(chip)]
IN_TURN = [chips[n % len(chips)] for n, chips in enumerate([[c for c in CASES if c[0] is f] for f in FEATURES])]


def cases(which):
    return pytest.mark.parametrize(("feature", "chip"), which, ids=[f"{f.name} {chip}" for f, chip in which])


@cases(IN_TURN)
def test_a_feature_gives_what_torch_gives(feature, chip):
    feature.check(chip)


@pytest.mark.executed
@cases([case for case in CASES if case not in IN_TURN])
def test_a_feature_on_every_chip(feature, chip):
    feature.check(chip)


def test_the_page_tells_how_many_features_each_chip_has():
    page = Path(__file__).parents[3] / "docs" / "ptx.md"
    if not page.is_file():
        pytest.skip("needs the repository's documentation")
    counts = {chip: sum(chip == each for _, each in CASES) for chip in CHIPS}
    row = " | ".join(f"{counts[chip]}" for chip in CHIPS)
    assert f"| {' | '.join(CHIPS)} |" in page.read_text()
    assert f"| of {len(FEATURES)} features | {row} |" in page.read_text()


@triton.jit
def _square(x, y, out, N: tl.constexpr, OF: tl.constexpr, SUMS: tl.constexpr):
    i = tl.arange(0, N)
    offsets = i[:, None] * N + i[None, :]
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    tl.store(out + offsets, tl.dot(a.to(OF), tl.trans(b).to(OF), out_dtype=SUMS))


@pytest.mark.sample(6)
@pytest.mark.parametrize("chip", ["sm_80", "sm_89", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("given", "of", "sums"),
    [
        (torch.int8, tl.int8, torch.int32),
        (torch.float16, tl.float16, torch.float16),
        (torch.float32, tl.float32, torch.float32),
        (torch.float32, tl.float8e5, torch.float32),
        (torch.float32, tl.float8e4nv, torch.float32),
        (torch.float64, tl.float64, torch.float64),
    ],
    ids=lambda kind: str(kind).removeprefix("torch."),
)
def test_products_of_four_warps(chip, given, of, sums):
    """tcgen05 on sm_100, wgmma on sm_90, mma.sync before; whole numbers, so that every sum is exact."""
    if chip == "sm_100" and of == tl.float64:
        pytest.skip("Triton 3.7.1 does not compile it")
    if chip == "sm_80" and of == tl.float8e4nv:
        pytest.skip("the compiler has it from sm_89 on")
    x, y = torch.randint(-2, 3, (2, 64, 64)).to(given)
    language = {torch.int32: tl.int32, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}
    with executed(chip):
        out = torch.empty(64, 64, dtype=sums)
        _square[(1,)](x, y, out, N=64, OF=of, SUMS=language[sums])
    assert torch.equal(out.double(), x.double() @ y.double().T)


@triton.jit
def _told(x, out):
    i = tl.arange(0, 32)
    a = tl.load(x + i)
    tl.device_print("of x", a, i)
    tl.device_assert(a < 3, "too large")
    tl.store(out + i, a)


@pytest.mark.sample(1)
@pytest.mark.parametrize("chip", ["sm_60", "sm_90"])
def test_a_kernel_prints_what_its_threads_hold_and_an_assertion_that_does_not_hold_is_a_fault(chip, capsys):
    with executed(chip, raising=False) as machine:
        _told[(1,)](torch.arange(32.0) / 16, torch.empty(32), num_warps=1, debug=True)
        assert not machine.faults
        _told[(1,)](torch.arange(32.0) / 8, torch.empty(32), num_warps=1, debug=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 128
    assert lines[5] == "pid (0, 0, 0) idx ( 5) of x: (operand 0) 0.312500"
    assert lines[37] == "pid (0, 0, 0) idx ( 5) of x: (operand 1) 5"
    assert {fault.kind for fault in machine.faults} == {"assertion"}
    assert all("too large" in fault.message for fault in machine.faults)
