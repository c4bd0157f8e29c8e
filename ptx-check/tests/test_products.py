"""mma.sync of every shape and type, against the places that the PTX reference gives elements in registers."""

import numpy as np
import pytest
from meanings import encoded, into_eight
from ptx_text import run

from ptx_check.allocations import POISON

RANDOM = np.random.default_rng(5)
WIDTH = {"s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1, "f16": 2, "bf16": 2, "f32": 4, "s32": 4, "tf32": 4, "f64": 8}


def bits(value: float, kind: str) -> int:
    if kind in ("e4m3", "e5m2"):
        return into_eight(value, kind)
    if kind[0] in "su":
        return int(value) & ((1 << 8 * WIDTH[kind]) - 1)
    return encoded(value, kind) | (0x1FFF if kind == "tf32" else 0)  # bits that a product of tf32 ignores


def a_place(lane: int, i: int, kind: str, rows: int) -> tuple[int, int]:
    """Row and column of a thread's element: tables of chapter 9.7.14.5, shape by shape."""
    group, within = lane // 4, lane % 4
    if kind == "f64":
        return (group, within) if rows == 8 else (group + 8 * (i % 2), within + 4 * (i // 2))
    if WIDTH[kind] == 4:
        return group + 8 * (i in (1, 3)), within + 4 * (i >= 2)
    if WIDTH[kind] == 1:
        return group + 8 * (i in (4, 5, 6, 7) or i >= 12), within * 4 + (i & 3) + 16 * (i >= 8)
    return group + 8 * (i in (2, 3, 6, 7)), within * 2 + i % 2 + 8 * (i >= 4)


def b_place(lane: int, i: int, kind: str) -> tuple[int, int]:
    group, within = lane // 4, lane % 4
    if kind == "f64":
        return within + 4 * i, group
    if WIDTH[kind] == 4:
        return within + 4 * i, group
    if WIDTH[kind] == 1:
        return within * 4 + (i & 3) + 16 * (i >= 4), group
    return within * 2 + i % 2 + 8 * (i >= 2), group


def c_place(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + 8 * (i >= 2), lane % 4 * 2 + i % 2


def registers(matrix, places, kind: str) -> np.ndarray:
    """Of all lanes one after the other."""
    elements = np.array([[bits(matrix[place], kind) for place in lane] for lane in places], f"u{WIDTH[kind]}")
    return elements.view("u8" if kind == "f64" else "u4")


SHAPES = [
    *((m, k, a, b, "s32") for m, k in ((8, 16), (16, 16), (16, 32)) for a in ("s8", "u8") for b in ("s8", "u8")),
    *((16, 32, a, b, c) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for c in ("f32", "f16")),
    *((m, k, "f64", "f64", "f64") for m, k in ((8, 4), (16, 4), (16, 8), (16, 16))),
    (16, 16, "f16", "f16", "f16"), (16, 8, "f16", "f16", "f16"), (16, 8, "bf16", "bf16", "f32"),
    (16, 16, "bf16", "bf16", "f32"), (16, 16, "f16", "f16", "f32"), (16, 8, "tf32", "tf32", "f32"),
]  # fmt: skip


def product(m: int, k: int, a: str, b: str, c: str, mode: str = "", largest: int = 8, unwritten: str = ""):
    """Runs one product of a warp; (what it gives, what it should), element by element of every lane. unwritten: the
    operand that nobody wrote: a, b or c."""
    low = [0 if kind == "u8" else -largest for kind in (a, b)]
    left, right = (RANDOM.integers(least, largest + 1, shape).astype("f8")
                   for least, shape in zip(low, ((m, k), (k, 8))))  # fmt: skip
    sums = RANDOM.integers(-8, 9, (m, 8)).astype("f8")
    counts = m * k // 32, k * 8 // 32, m * 8 // 32
    c_places = [[c_place(lane, i) for i in range(counts[2])] for lane in range(32)]
    memory = {
        "a": registers(left, [[a_place(lane, i, a, m) for i in range(counts[0])] for lane in range(32)], a),
        "b": registers(right, [[b_place(lane, i, b) for i in range(counts[1])] for lane in range(32)], b),
        "c": registers(sums, c_places, c),
    }
    if unwritten:
        memory[unwritten].view("u2")[:] = POISON[2]
    name, size, kind = ("%rd", 8, "b64") if a == "f64" else ("%r", 4, "b32")
    lines, groups = ["mov.u32 %r1, %tid.x;"], []
    for position, each in enumerate(memory.values()):
        count, first = each.shape[1], 20 + 10 * position
        lines.append(f"mad.wide.u32 %rd{10 + position}, %r1, {size * count}, %rd{position + 1};")
        lines += [f"ld.global.{kind} {name}{first + i}, [%rd{10 + position}+{size * i}];" for i in range(count)]
        groups.append("{" + ", ".join(f"{name}{first + i}" for i in range(count)) + "}")
    lines.append(f"mma.sync.aligned.m{m}n8k{k}.row.col{mode}.{c}.{a}.{b}.{c} {groups[2]}, {', '.join(groups)};")
    lines += [f"st.global.{kind} [%rd12+{size * i}], {name}{40 + i};" for i in range(memory["c"].shape[1])]
    ran = run("\n".join(lines), fresh=[unwritten], **memory)
    stored = {"s32": "i4", "f16": "f2", "f32": "f4", "f64": "f8"}[c]
    wanted = left @ right + sums
    return ran, ran["c"].reshape(32, -1).view(stored).tolist(), [[wanted[place] for place in row] for row in c_places]


@pytest.mark.parametrize(("m", "k", "a", "b", "c"), SHAPES)
def test_products_of_every_shape_and_type_and_of_what_nobody_wrote(m, k, a, b, c):
    ran, actual, wanted = product(m, k, a, b, c, largest={"f16": 3, "s32": 127}.get(c, 8))
    assert not ran.faults
    assert actual == wanted
    for operand in "abc":
        assert product(m, k, a, b, c, unwritten=operand)[0].kinds == {"unwritten"}, operand


@pytest.mark.parametrize(("mode", "wanted"), [("", -(2**31) + 3), (".satfinite", 2**31 - 1)])
def test_sums_beyond_their_range(mode, wanted):
    body = f"""
    mov.b32 %r2, 0x01010101;
    mov.b32 %r3, {2**31 - 29};
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd10, %r1, 4, %rd1;
    mma.sync.aligned.m16n8k32.row.col{mode}.s32.s8.s8.s32 {{%r4, %r5, %r6, %r7}}, {{%r2, %r2, %r2, %r2}}, {{%r2, %r2}},
      {{%r3, %r3, %r3, %r3}};
    st.global.b32 [%rd10], %r4;"""
    assert set(run(body, x=np.zeros(32, "i4"))["x"].tolist()) == {wanted}
