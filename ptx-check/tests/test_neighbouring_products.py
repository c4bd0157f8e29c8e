"""Runs of mma.sync that are executed as one product: what they give is what each alone gives."""

import numpy as np
import pytest
from ptx_text import run

from ptx_check.matrices import Matrices

RANDOM = np.random.default_rng(11)
FORMS = {
    "bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "s8": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
}
LEFT, RIGHT, SUMS = 100, 120, 140
"""The first registers of the operands: fragments of 4, of 2 and of 4."""


def registers(first: int, size: int, number: int) -> str:
    return "{" + ", ".join(f"%r{first + size * number + i}" for i in range(size)) + "}"


def mma(kind: str, sums: int, left: int, right: int) -> str:
    tile = registers(SUMS, 4, sums)
    return f"{FORMS[kind]} {tile}, {registers(LEFT, 4, left)}, {registers(RIGHT, 2, right)}, {tile};"


def tile(kind: str) -> list[str]:
    """Two pieces of rows by two of columns, two steps deep."""
    return [mma(kind, 2 * m + n, 2 * k + m, 2 * k + n) for k in (0, 1) for m in (0, 1) for n in (0, 1)]


def computed(kind: str, lines: list[str], monkeypatch, *, between: str = "", threads: int = 64):
    """The sums of all threads, and how many products were computed."""
    if kind == "bf16":  # small whole numbers, whose sums are exact
        words = RANDOM_NUMBERS.astype("f4").view("u4")
        words = (words[..., 0] >> 16) | (words[..., 1] & 0xFFFF0000)
    else:
        words = RANDOM_NUMBERS[..., 0].astype("u4") * np.uint32(0x01F3A5C7)
    body = ["mov.u32 %r1, %tid.x;", "mad.wide.u32 %rd10, %r1, 4, %rd1;", "mad.wide.u32 %rd11, %r1, 64, %rd2;"]
    body += [f"ld.global.b32 %r{LEFT + i}, [%rd10+{256 * i}];" for i in range(32)]
    body += [f"mov.b32 %r{SUMS + i}, {i % 3 if kind == 's8' else '0f40000000'};" for i in range(16)]
    for line in lines:
        body += [line, between]
    body += [f"st.global.b32 [%rd11+{4 * i}], %r{SUMS + i};" for i in range(16)]
    calls: list[tuple] = []
    multiply = Matrices.multiply
    with monkeypatch.context() as patched:
        patched.setattr(Matrices, "multiply", lambda self, *args: calls.append(args) or multiply(self, *args))
        ran = run("\n".join(body), threads=threads, x=words, out=np.zeros((threads, 16), "u4"))
    assert not ran.faults
    return ran["out"], len(calls)


RANDOM_NUMBERS = RANDOM.integers(-5, 6, (32, 64, 2))
APART = "bar.warp.sync -1;"


@pytest.mark.parametrize("kind", FORMS)
def test_a_tile_is_one_product(kind, monkeypatch):
    together, products = computed(kind, tile(kind), monkeypatch)
    apart, each = computed(kind, tile(kind), monkeypatch, between=APART)
    assert (products, each) == (1, 8)
    assert (together == apart).all()
    assert len(np.unique(apart)) > 20


@pytest.mark.parametrize("kind", FORMS)
def test_moves_of_other_registers_stand_between_them(kind, monkeypatch):
    lines = tile(kind)
    lines[2:2] = [f"mov.b32 %r{SUMS + 8 + i}, 0;" for i in range(4)]  # the sums of the piece that comes next
    wanted, _ = computed(kind, lines, monkeypatch, between=APART)
    found, products = computed(kind, lines, monkeypatch)
    assert products == 1
    assert (found == wanted).all()


BROKEN = {
    "a piece is missing": lambda kind: [line for i, line in enumerate(tile(kind)) if i not in (3, 7)],
    "a step is missing": lambda kind: tile(kind)[:-1],
    "the same product twice": lambda kind: [*tile(kind), mma(kind, 0, 0, 0), mma(kind, 1, 0, 0)],
    "a mov changes a factor": lambda kind: [*tile(kind)[:4], f"mov.b32 %r{LEFT + 8}, %r{LEFT};", *tile(kind)[4:]],
    "a mov reads a sum": lambda kind: [*tile(kind)[:4], f"mov.b32 %r{LEFT + 8}, %r{SUMS};", *tile(kind)[4:]],
    "sums are factors": lambda kind: [
        mma(kind, 0, 0, 0),
        f"{FORMS[kind]} {registers(SUMS, 4, 1)}, {registers(SUMS, 4, 0)}, {registers(RIGHT, 2, 1)}, "
        f"{registers(SUMS, 4, 1)};",
    ],
    "factors become sums": lambda kind: [
        mma(kind, 0, 0, 0),
        f"{FORMS[kind]} {registers(LEFT, 4, 0)}, {registers(LEFT, 4, 1)}, {registers(RIGHT, 2, 1)}, "
        f"{registers(LEFT, 4, 0)};",
        f"mov.b32 %r{SUMS + 9}, %r{LEFT};",
    ],
    "sums in another order": lambda kind: [
        mma(kind, 0, 0, 0),
        mma(kind, 0, 1, 1).replace(registers(SUMS, 4, 0), f"{{%r{SUMS + 1}, %r{SUMS}, %r{SUMS + 3}, %r{SUMS + 2}}}"),
    ],
    "sums elsewhere": lambda kind: [
        mma(kind, 0, 0, 0),
        mma(kind, 1, 0, 1).replace(registers(SUMS, 4, 1), registers(SUMS, 4, 0), 1),
    ],
}


@pytest.mark.parametrize("lines", BROKEN.values(), ids=BROKEN)
def test_runs_of_other_shapes(lines, monkeypatch):
    wanted, _ = computed("s8", lines("s8"), monkeypatch, between=APART)
    found, _ = computed("s8", lines("s8"), monkeypatch)
    assert (found == wanted).all()


def test_what_nobody_wrote_is_followed_through_a_tile():
    """The word is of the second piece of rows, at the second step, in its lower half."""
    body = "\n".join(
        [f"mov.b32 %r{LEFT + i}, 0;" for i in range(32) if i != 13]
        + [f"mov.b32 %r{SUMS + i}, 0;" for i in range(16)]
        + [*tile("bf16"), "st.global.b32 [%rd1], %r{sums};"]
    )
    kinds = [run(body.replace("{sums}", str(SUMS + 4 * n + 2)), x=np.zeros(4, "u4")).kinds for n in range(4)]
    assert kinds == [set(), set(), {"unwritten"}, {"unwritten"}]
