"""Runs of mma.sync that are executed as one product: what they give is what each alone gives."""

import numpy as np
import pytest
from ptx_text import run

from ptx_check.matrices import Matrices

NUMBERS = np.random.default_rng(11).integers(-5, 6, (32, 64, 2))
FORMS = {
    "bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "s8": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
}
LEFT, RIGHT, SUMS = 100, 120, 140
"""The first registers of the operands: fragments of 4, of 2 and of 4."""
APART = "bar.warp.sync -1;"


def registers(first: int, size: int, number: int) -> str:
    return "{" + ", ".join(f"%r{first + size * number + i}" for i in range(size)) + "}"


def mma(kind: str, sums: int, left: int, right: int) -> str:
    tile = registers(SUMS, 4, sums)
    return f"{FORMS[kind]} {tile}, {registers(LEFT, 4, left)}, {registers(RIGHT, 2, right)}, {tile};"


def tile(kind: str) -> list[str]:
    """Two pieces of rows by two of columns, two steps deep."""
    return [mma(kind, 2 * m + n, 2 * k + m, 2 * k + n) for k in (0, 1) for m in (0, 1) for n in (0, 1)]


def with_moves(kind: str) -> list[str]:
    """Moves to other registers, the sums of the piece that comes next, stand between the products."""
    lines = tile(kind)
    return [*lines[:2], *(f"mov.b32 %r{SUMS + 8 + i}, 0;" for i in range(4)), *lines[2:]]


def computed(kind: str, lines: list[str], monkeypatch, *, between: str = ""):
    """The sums of all threads, and how many products were computed."""
    if kind == "bf16":  # small whole numbers, whose sums are exact
        words = NUMBERS.astype("f4").view("u4")
        words = (words[..., 0] >> 16) | (words[..., 1] & 0xFFFF0000)
    else:
        words = NUMBERS[..., 0].astype("u4") * np.uint32(0x01F3A5C7)
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
        ran = run("\n".join(body), threads=64, x=words, out=np.zeros((64, 16), "u4"))
    assert not ran.faults
    return ran["out"], len(calls)


@pytest.mark.parametrize("lines", [tile, with_moves])
@pytest.mark.parametrize("kind", FORMS)
def test_a_tile_is_one_product(kind, lines, monkeypatch):
    together, products = computed(kind, lines(kind), monkeypatch)
    apart, _ = computed(kind, lines(kind), monkeypatch, between=APART)
    assert products == 1
    assert (together == apart).all()
    assert len(np.unique(apart)) > 20


TILE, OTHER = tile("s8"), registers(LEFT, 4, 0)
COPY = f"mov.b32 %r{LEFT + 8}, %r{{}};"
BROKEN = {
    "a piece is missing": [line for i, line in enumerate(TILE) if i not in (3, 7)],
    "a step is missing": TILE[:-1],
    "the same product twice": [*TILE, mma("s8", 0, 0, 0), mma("s8", 1, 0, 0)],
    "a mov changes a factor": [*TILE[:4], COPY.format(LEFT), *TILE[4:]],
    "a mov reads a sum": [*TILE[:4], COPY.format(SUMS), *TILE[4:]],
    "sums are factors": [TILE[0], TILE[1].replace(OTHER, registers(SUMS, 4, 0))],
    "factors become sums": [
        TILE[0],
        f"{FORMS['s8']} {OTHER}, {registers(LEFT, 4, 1)}, {registers(RIGHT, 2, 1)}, {OTHER};",
        f"mov.b32 %r{SUMS + 9}, %r{LEFT};",
    ],
    "sums in another order": [
        TILE[0],
        mma("s8", 0, 1, 1).replace(registers(SUMS, 4, 0), f"{{%r{SUMS + 1}, %r{SUMS}, %r{SUMS + 3}, %r{SUMS + 2}}}"),
    ],
    "sums elsewhere": [TILE[0], TILE[1].replace(registers(SUMS, 4, 1), registers(SUMS, 4, 0), 1)],
}


@pytest.mark.parametrize("lines", BROKEN.values(), ids=BROKEN)
def test_runs_of_other_shapes(lines, monkeypatch):
    wanted, _ = computed("s8", lines, monkeypatch, between=APART)
    found, _ = computed("s8", lines, monkeypatch)
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
