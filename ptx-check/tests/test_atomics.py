"""Atomic operations of every form, with and without results, on global and shared memory."""

import random

import numpy as np
import pytest
from meanings import decoded, encoded, integer, rounded, width
from ptx_text import BYTES, REGISTERS, run

OPERATIONS = [f"{name}.{kind}" for name, kinds in {
    "add": "u32 s32 u64 f32 f64 noftz.f16 noftz.bf16 noftz.f16x2 noftz.bf16x2", "min": "u32 s32 u64 s64",
    "max": "u32 s32 u64 s64", "and": "b32 b64", "or": "b32 b64", "xor": "b32 b64", "inc": "u32", "dec": "u32",
    "exch": "b32 b64", "cas": "b16 b32 b64",
}.items() for kind in kinds.split()]  # fmt: skip
THREADS, PLACES = 64, 7


def applied(name: str, kind: str, old: int, given: int, compared: int) -> int:
    """One operation on bits, in whole numbers and Fractions."""
    ones = (1 << width(kind)) - 1
    if kind.endswith("x2"):
        halves = (applied(name, kind[:-2], old >> s & 0xFFFF, given >> s & 0xFFFF, 0) << s for s in (0, 16))
        return sum(halves)
    if name == "add" and kind[0] in "fb":
        return encoded(rounded(decoded(old, kind) + decoded(given, kind), kind), kind)
    a, b = integer(old, kind), integer(given, kind)
    return {"add": a + b, "min": min(a, b), "max": max(a, b), "and": a & b, "or": a | b, "xor": a ^ b, "exch": b,
            "inc": 0 if a >= b else a + 1, "dec": b if a == 0 or a > b else a - 1,
            "cas": b if a == compared else a}[name] & ones  # fmt: skip


def numbers(kind: str, count: int, draw: random.Random) -> list[int]:
    if kind.endswith("x2"):
        low, high = (numbers(kind[:-2], count, draw) for _ in range(2))
        return [a | b << 16 for a, b in zip(low, high)]
    if kind[0] == "f" or kind.startswith("bf"):
        return [encoded(draw.randrange(-64, 65) / 8, kind) for _ in range(count)]
    return [draw.choice([draw.randrange(4), draw.getrandbits(width(kind))]) for _ in range(count)]


@pytest.mark.parametrize("place", ["global", "shared"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_threads_take_turns_and_find_what_the_one_before_left(operation, place):
    name, *_, kind = operation.split(".")
    bits = f"b{width(kind)}"
    size, register, draw = BYTES[bits], REGISTERS[bits], random.Random(operation)
    places = [draw.randrange(PLACES) for _ in range(THREADS)]
    given, compared = numbers(kind, THREADS, draw), [draw.randrange(3) for _ in range(THREADS)]
    memory = numbers(kind, PLACES, draw) if name != "cas" else [0] * PLACES
    given = [g % 3 for g in given] if name == "cas" else given
    target = "%rd30" if place == "global" else "%r31"
    copy_in = f"""
    setp.lt.u32 %p1, %r1, {PLACES};
    mad.wide.u32 %rd31, %r1, {size}, %rd4;
    mul.lo.u32 %r32, %r1, {size};
    @%p1 ld.global.{bits} {register}40, [%rd31];
    @%p1 st.shared.{bits} [%r32], {register}40;
    bar.sync 0;"""
    copy_out = f"bar.sync 0;\n@%p1 ld.shared.{bits} {register}40, [%r32];\n@%p1 st.global.{bits} [%rd31], {register}40;"
    sources = f"{register}11, {register}10" if name == "cas" else f"{register}10"
    body = f"""
    mov.u32 %r1, %tid.x;
    {copy_in if place == "shared" else ""}
    mad.wide.u32 %rd20, %r1, 4, %rd1;
    mad.wide.u32 %rd21, %r1, {size}, %rd2;
    mad.wide.u32 %rd22, %r1, {size}, %rd3;
    mad.wide.u32 %rd23, %r1, {size}, %rd5;
    ld.global.b32 %r30, [%rd20];
    ld.global.{bits} {register}10, [%rd21];
    ld.global.{bits} {register}11, [%rd22];
    mad.wide.u32 %rd30, %r30, {size}, %rd4;
    mul.lo.u32 %r31, %r30, {size};
    atom.{place}.{operation} {register}20, [{target}], {sources};
    st.global.{bits} [%rd23], {register}20;
    {copy_out if place == "shared" else ""}"""
    unsigned = f"u{size}"
    ran = run(
        body, threads=THREADS, shared=PLACES * size, places=np.array(places, "u4"), given=np.array(given, unsigned),
        compared=np.array(compared, unsigned), memory=np.array(memory, unsigned), found=np.zeros(THREADS, unsigned),
    )  # fmt: skip
    assert not ran.faults
    found = []
    for where, what, other in zip(places, given, compared):
        found.append(memory[where])
        memory[where] = applied(name, kind, memory[where], what, other)
    assert ran["found"].tolist() == found
    assert ran["memory"].tolist() == memory


SHARED = "mov.u32 %r1, %tid.x;\nand.b32 %r2, %r1, 28;\nst.shared.b32 [%r2], 0;\nbar.sync 0;\n"


@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        ("atom.shared.add.u32 %r3, [%r2], 1;\nld.shared.b32 %r4, [%r2];", {"race"}),
        ("ld.shared.b32 %r4, [%r2];\natom.shared.add.u32 %r3, [%r2], 1;", {"race"}),
        ("atom.shared.add.u32 %r3, [%r2], 1;\nst.shared.b32 [%r2], 1;", {"race"}),
        ("atom.shared.add.u32 %r3, [%r2], 1;\nbar.sync 0;\nld.shared.b32 %r4, [%r2];", set()),
        ("atom.shared.add.u32 %r3, [%r2], 1;\natom.shared.max.u32 %r3, [%r2], 1;", set()),
        ("atom.shared.add.u32 %r3, [%r2+32], 1;", {"unwritten"}),
        ("atom.shared.add.u32 %r3, [%r2+2], 1;", {"alignment"}),
    ],
)
def test_atomic_operations_on_shared_memory_are_ordered_among_themselves_alone(lines, kinds):
    assert run(SHARED + lines, shared=64).kinds == kinds
