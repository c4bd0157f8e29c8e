"""A thread's own memory, constants that a kernel brings along, hints to caches, and sums that carry."""

import numpy as np
import pytest
from meanings import carried, width
from ptx_text import BYTES, REGISTERS, run
from test_every_form import COUNT, columns

from ptx_check.forms import carrying

OWN = "mov.u32 %r1, %tid.x;\nmad.wide.u32 %rd10, %r1, 4, %rd1;\n"
DEPOT = (
    ".local .align 4 .b8 __local_depot0[8];\n.reg .b64 %SPL;\nmov.b64 %SPL, __local_depot0;\nadd.u64 %rd9, %SPL, 0;\n"
)


@pytest.mark.parametrize("opcode", sorted(carrying()))
def test_sums_that_carry(opcode):
    """One word and what it carries, after a word that carries, or not."""
    word = opcode.split(".")[-1]
    kind = f"b{width(word)}"
    given = columns((word,) * (3 if opcode.startswith("mad") else 2))
    names = [f"{REGISTERS[kind]}{10 + n}" for n in range(len(given))]
    size, memory, lines = BYTES[kind], {}, ["mov.u32 %r500, %tid.x;"]
    for position, (name, column) in enumerate(zip(names, given)):
        memory[f"x{position}"] = np.array(column, f"u{size}")
        lines += [f"mad.wide.u32 %rd50, %r500, {size}, %rd{position + 1};", f"ld.global.{kind} {name}, [%rd50];"]
    memory["carry"] = np.arange(COUNT, dtype="u4") % 2
    last, result = len(given) + 1, f"{REGISTERS[kind]}40"
    memory |= {"out": np.zeros(COUNT, f"u{size}"), "carries": np.zeros(COUNT, "u4")}
    before = "sub.cc.u32 %r60, 0, %r61;" if opcode.startswith("sub") else "add.cc.u32 %r60, %r61, -1;"
    lines += [
        f"mad.wide.u32 %rd50, %r500, 4, %rd{last};\nld.global.b32 %r61, [%rd50];",
        f"{before}\n{opcode} {result}, {', '.join(names)};\naddc.u32 %r62, 0, 0;",
        f"mad.wide.u32 %rd50, %r500, {size}, %rd{last + 1};\nst.global.{kind} [%rd50], {result};",
        f"mad.wide.u32 %rd50, %r500, 4, %rd{last + 2};\nst.global.b32 [%rd50], %r62;",
    ]
    ran = run("\n".join(lines), threads=COUNT, **memory)
    assert not ran.faults
    for place, (*bits, carry) in enumerate(zip(*given, memory["carry"].tolist())):
        value, more = carried(opcode, list(bits), carry)
        assert ran["out"][place] == value, (opcode, bits, carry)
        assert ran["carries"][place] == (more if ".cc" in opcode else carry), (opcode, bits, carry)


def test_what_is_carried_of_what_nobody_wrote_is_marked():
    body = (
        OWN + "ld.global.b32 %r2, [%rd10];\nadd.cc.u32 %r3, %r2, 1;\naddc.u32 %r4, 0, 0;\nst.global.b32 [%rd10], %r4;"
    )
    assert run(body, x=np.full(32, 0xFFA5FFA5, "u4"), fresh=["x"]).kinds == {"unwritten"}
    assert not run(body, x=np.zeros(32, "u4")).faults


def test_a_thread_has_memory_of_its_own():
    body = f"{DEPOT}{OWN}cvt.u32.u64 %r2, %rd9;\nst.local.b32 [%r2+4], %r1;\nld.local.b32 %r3, [%rd9+4];"
    ran = run(f"{body}\nst.global.b32 [%rd10], %r3;", threads=64, grid=(2, 1, 1), x=np.zeros(64, "u4"))
    assert ran.kinds == {"programs"}  # both store the same place of x, and nothing else is shared
    assert ran["x"].tolist() == list(range(64))


@pytest.mark.parametrize(("offset", "kinds"), [(0, {"unwritten"}), (8, {"bounds"}), (5, {"alignment"})])
def test_a_threads_own_memory_has_bounds_and_may_be_unwritten(offset, kinds):
    body = f"{DEPOT}{OWN}st.local.b32 [%rd9+4], %r1;\nld.local.b32 %r3, [%rd9+{offset}];\nst.global.b32 [%rd10], %r3;"
    assert run(body, x=np.zeros(32, "u4")).kinds & kinds == kinds
