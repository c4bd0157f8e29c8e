"""What nobody wrote is followed to its use: bytes, halves of words, registers, copies and products."""

import numpy as np
import pytest
import torch
from ptx_text import OWN, run

from ptx_check.allocations import POISON, Allocations, Marks, marks_of

LOAD, STORED = "ld.global.b32 %r2, [%rd11];\n", "\nst.global.b32 [%rd12], %r2;"
FRESH = np.full(32, POISON[4])
NONE = np.zeros(32, "u4")
HALVES = np.tile(np.array([5, POISON[2]], "u2"), 32).view("u4")
BYTES = np.tile(np.array([5, POISON[2] >> 8, 6, POISON[2] >> 8], "u1"), 32).view("u4")
"""Bytes 1 and 3 of every word were not written: 0xFF in POISON."""


def partly(count: int) -> np.ndarray:
    """Words of which the first `count` were written."""
    words = FRESH.copy()
    words[:count] = 5
    return words


NOT_WRITTEN, WRITTEN = partly(0), partly(32)
ADDRESS = "and.b32 %r2, %r2, 31;\nmad.wide.u32 %rd13, %r2, 4, %rd2;\nst.global.b32 [%rd13], %r1;"
IN_HALF = "setp.lt.u32 %p1, %r1, 16;\n"
DISCARDED = LOAD + IN_HALF + "selp.b32 %r2, %r2, 0, %p1;" + STORED
"""tl.where(mask, tl.load(x), 0)"""
DECIDED = LOAD + IN_HALF + "setp.gt.u32 %p2, %r2, 3;\n{}\nselp.b32 %r2, 1, 0, %p3;" + STORED
CHOSEN = "ld.global.b32 %r3, [%rd11];\nsetp.eq.b32 %p1, %r3, 7;\nselp.{} %r2, %r1, %r3, %p1;" + STORED
OF_HALF = LOAD + "mov.b32 {%rs1, %rs2}, %r2;\nst.global.b16 [%rd12], "
IN_SHARED = "mov.b16 %rs1, 7;\nshl.b32 %r2, %r1, 2;\nst.shared.b16 [%r2], %rs1;\nbar.sync 0;\n"
THROUGH = "shl.b32 %r3, %r1, 2;\nst.shared.b32 [%r3], %r2;\nld.shared.b32 %r2, [%r3];"
PRODUCT = """
setp.lt.u32 %p1, %r1, {};
ld.global.b32 %r2, [%rd11];
mov.b32 %r3, 0;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%r4, %r5, %r6, %r7}}, {{%r2, %r3, %r3, %r3}}, {{%r3, %r3}},
  {{%r3, %r3, %r3, %r3}};
selp.b32 %r2, %r4, 0, %p1;
st.global.b32 [%rd12], %r2;
st.global.b32 [%rd12], %r6;"""


@pytest.mark.parametrize(
    ("body", "x", "found"),
    [
        (LOAD, NOT_WRITTEN, False),
        (LOAD + STORED, NOT_WRITTEN, True),
        (LOAD + "setp.eq.b32 %p1, %r2, 0;\n@%p1 bra $L__A;\n$L__A:\nmov.b32 %r2, 0;", NOT_WRITTEN, True),
        (LOAD + "setp.eq.b32 %p1, %r2, 0;\n@%p1 st.global.b32 [%rd12], %r1;", NOT_WRITTEN, True),
        (LOAD + ADDRESS, NOT_WRITTEN, True),
        (LOAD + "red.global.add.u32 [%rd12], %r2;", NOT_WRITTEN, True),
        (LOAD + "shfl.sync.bfly.b32 %r2, %r2, 1, 31, -1;" + STORED, NOT_WRITTEN, True),
        (LOAD + "redux.sync.add.s32 %r2, %r2, -1;" + STORED, NOT_WRITTEN, True),
        (LOAD + "and.b32 %r2, %r2, 0;" + STORED, NOT_WRITTEN, False),
        (LOAD + "or.b32 %r2, %r2, -1;" + STORED, NOT_WRITTEN, False),
        (LOAD + "mov.b32 %r2, 7;" + STORED, NOT_WRITTEN, False),
        (LOAD + "shl.b32 %r2, %r2, 31;\nbfe.u32 %r2, %r2, 0, 16;" + STORED, NOT_WRITTEN, False),
        (DISCARDED, partly(16), False),
        (DISCARDED, partly(15), True),
        (CHOSEN.format("f32"), NOT_WRITTEN, True),
        (CHOSEN.format("b32"), NOT_WRITTEN, True),
        (CHOSEN.format("f32"), WRITTEN, False),
        (DECIDED.format("and.pred %p3, %p1, %p2;"), partly(16), False),
        (DECIDED.format("and.pred %p3, %p1, %p2;"), partly(12), True),
        (DECIDED.format("setp.gt.and.u32 %p3, %r2, 3, %p1;"), partly(16), False),
        (DECIDED.format("setp.gt.and.u32 %p3, %r2, 3, %p1;"), partly(12), True),
        (OF_HALF + "%rs1;", HALVES, False),
        (OF_HALF + "%rs2;", HALVES, True),
        (LOAD + "not.b32 %r2, %r2;\ncvt.u16.u32 %rs1, %r2;\nst.global.b16 [%rd12], %rs1;", HALVES, False),
        (LOAD + "not.b32 %r2, %r2;\nshr.u32 %r2, %r2, 16;" + STORED, HALVES, True),
        ("ld.global.b8 %rs1, [%rd11+2];\nst.global.b8 [%rd12], %rs1;", BYTES, False),
        ("ld.global.b8 %rs1, [%rd11+3];\nst.global.b8 [%rd12], %rs1;", BYTES, True),
        (IN_SHARED + "ld.shared.b16 %rs2, [%r2];\nst.global.b16 [%rd12], %rs2;", NOT_WRITTEN, False),
        (IN_SHARED + "ld.shared.b16 %rs2, [%r2+2];\nst.global.b16 [%rd12], %rs2;", NOT_WRITTEN, True),
        (LOAD + THROUGH + STORED, NOT_WRITTEN, True),
        (LOAD + THROUGH + STORED, WRITTEN, False),
        (PRODUCT.format(32), partly(16), True),
        (PRODUCT.format(16), partly(16), False),  # rows of A that nobody wrote spoil those rows of the product alone
        ("add.s32 %r2, %r9, 1;", NOT_WRITTEN, False),
        ("add.s32 %r2, %r9, 1;" + STORED, NOT_WRITTEN, True),  # a register that nothing was put in
        (IN_HALF + "@%p1 mov.b32 %r9, 5;\nmov.b32 %r2, %r9;" + STORED, NOT_WRITTEN, True),
        ("setp.lt.u32 %p1, %r1, 32;\n@%p1 mov.b32 %r9, 5;\nmov.b32 %r2, %r9;" + STORED, NOT_WRITTEN, False),
    ],
)  # fmt: skip
def test_uses_of_what_nobody_wrote_and_what_is_none(body, x, found):
    ran = run(OWN + body, x=x, y=NONE, fresh=["x"], shared=128)
    assert "unwritten" in ran.kinds if found else not ran.faults


def test_numbers_that_look_like_poison_are_numbers():
    """int16 -91, as every element of an array that was written."""
    words = np.full(64, -91, "i2").view("u4")
    assert not run(OWN + LOAD + STORED, x=words, y=NONE).faults


def test_allocations_are_marked_and_operators_take_the_marks():
    def left(tensor) -> int:
        marks = marks_of(tensor.untyped_storage())
        return 0 if marks is None else int(np.count_nonzero(marks))

    with Allocations():
        x = torch.empty(4, 8)
        assert left(x) == 128
        x[1].zero_()
        assert left(x) == 96
        x[:, ::2] = 3
        assert left(x) == 48
        assert left(torch.zeros(8)) == left(torch.empty(8).fill_(1.0)) == left(torch.empty(8) + 1) == 0
        assert left(torch.empty_like(x)) == left(x.new_empty(4, 8)) == 128
        y = torch.empty(16, dtype=torch.int16).fill_(-91)
        assert left(y) == 0
        z = torch.empty(16)
        z.numpy()[:] = 1
        assert left(z) == 0
    assert left(torch.empty(8)) == 0


def test_marks_of_a_storage_that_lay_at_the_same_address_are_none_of_the_next():
    """Its size may differ, and what is written there is no longer what was marked."""
    first, second, marks = torch.empty(8), torch.empty(1000), Marks()
    marks.put(first.untyped_storage(), np.ones(32, dtype=bool))
    address, kept = next(iter(marks._of.items()))
    marks._of = {second.data_ptr(): kept}
    marks.written(second[1:])
    assert marks.of(second.untyped_storage()) is None
    assert address == first.data_ptr()
    assert not marks
