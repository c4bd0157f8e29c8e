"""What nobody wrote is followed to its use: bytes, halves of words, registers, copies and products."""

import numpy as np
import pytest
import torch
from ptx_text import OWN, run

from ptx_check.allocations import POISON, Allocations, Marks, mark, marks_of

STORED = "st.global.b32 [%rd12], %r2;"
FRESH = np.full(32, POISON[4])
NONE = np.zeros(32, "u4")


def kinds(body: str, x=FRESH, **more) -> set[str]:
    return run(OWN + body, x=x, y=NONE, fresh=["x"], **more).kinds


def partly(count: int, value: int = 5) -> np.ndarray:
    """Words of which the first `count` were written."""
    words = FRESH.copy()
    words[:count] = value
    return words


def test_a_load_is_no_fault_and_what_is_stored_of_it_is_one():
    assert kinds("ld.global.b32 %r2, [%rd11];") == set()
    ran = run(f"{OWN}ld.global.b32 %r2, [%rd11];\n{STORED}", x=FRESH, y=NONE, fresh=["x"])
    assert ran.kinds == {"unwritten"}
    assert ran.faults[0].other is not None
    assert ran.faults[0].location.line < ran.faults[0].other.line


@pytest.mark.parametrize(
    ("use", "found"),
    [
        ("add.s32 %r2, %r2, 1;\n" + STORED, True),
        ("setp.eq.b32 %p1, %r2, 0;\n@%p1 bra $L__A;\n$L__A:\nmov.b32 %r2, 0;", True),
        ("setp.eq.b32 %p1, %r2, 0;\n@%p1 st.global.b32 [%rd12], %r1;", True),
        ("and.b32 %r2, %r2, 31;\nmad.wide.u32 %rd13, %r2, 4, %rd2;\nst.global.b32 [%rd13], %r1;", True),
        ("red.global.add.u32 [%rd12], %r2;", True),
        ("shfl.sync.bfly.b32 %r2, %r2, 1, 31, -1;\n" + STORED, True),
        ("and.b32 %r2, %r2, 0;\n" + STORED, False),
        ("or.b32 %r2, %r2, -1;\n" + STORED, False),
        ("mov.b32 %r2, 7;\n" + STORED, False),
        ("shl.b32 %r2, %r2, 31;\nbfe.u32 %r2, %r2, 0, 16;\n" + STORED, False),
    ],
)
def test_uses_and_what_is_none(use, found):
    assert ("unwritten" in kinds(f"ld.global.b32 %r2, [%rd11];\n{use}")) == found


@pytest.mark.parametrize("written", [16, 15])
def test_a_load_that_a_select_discards_is_no_fault(written):
    """tl.where(mask, tl.load(x), 0), with half of x written."""
    body = f"ld.global.b32 %r2, [%rd11];\nsetp.lt.u32 %p1, %r1, 16;\nselp.b32 %r2, %r2, 0, %p1;\n{STORED}"
    assert kinds(body, x=partly(written)) == (set() if written == 16 else {"unwritten"})


@pytest.mark.parametrize("opcode", ["selp.f32", "selp.b32", "selp.s32"])
def test_a_choice_that_nobody_wrote(opcode):
    body = f"ld.global.b32 %r3, [%rd11];\nsetp.eq.b32 %p1, %r3, 7;\n{opcode} %r2, %r1, %r3, %p1;\n{STORED}"
    assert kinds(body) == {"unwritten"}
    assert kinds(body, x=partly(32)) == set()


@pytest.mark.parametrize("predicate", ["and.pred %p3, %p1, %p2;", "setp.gt.and.u32 %p3, %r2, 3, %p1;"])
def test_a_comparison_that_another_decides(predicate):
    body = f"""
    ld.global.b32 %r2, [%rd11];
    setp.lt.u32 %p1, %r1, 16;
    setp.gt.u32 %p2, %r2, 3;
    {predicate}
    selp.b32 %r2, 1, 0, %p3;
    {STORED}"""
    assert kinds(body, x=partly(16)) == set()
    assert kinds(body, x=partly(12)) == {"unwritten"}


@pytest.mark.parametrize(("kept", "found"), [("%rs1", False), ("%rs2", True)])
def test_half_of_a_word(kept, found):
    words = np.tile(np.array([5, POISON[2]], "u2"), 32).view("u4")
    body = f"ld.global.b32 %r2, [%rd11];\nmov.b32 {{%rs1, %rs2}}, %r2;\nst.global.b16 [%rd12], {kept};"
    assert kinds(body, x=words) == ({"unwritten"} if found else set())


@pytest.mark.parametrize(("byte", "found"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_single_byte(byte, found):
    """Bytes 1 and 3 of every word were not written: 0xFF in POISON."""
    words = np.tile(np.array([5, POISON[2] >> 8, 6, POISON[2] >> 8], "u1"), 32).view("u4")
    assert kinds(f"ld.global.b8 %rs1, [%rd11+{byte}];\nst.global.b8 [%rd12], %rs1;", x=words) == (
        {"unwritten"} if found else set()
    )


def test_numbers_that_look_like_poison_are_numbers():
    """int16 -91, as every element of an array that was written."""
    words = np.full(64, -91, "i2").view("u4")
    assert not run(f"{OWN}ld.global.b32 %r2, [%rd11];\n{STORED}", x=words, y=NONE).faults


def test_shared_memory_is_marked_byte_by_byte():
    begin = "mov.b16 %rs1, 7;\nshl.b32 %r2, %r1, 2;\nst.shared.b16 [%r2], %rs1;\nbar.sync 0;\n"
    body = begin + "ld.shared.b16 %rs2, [%r2{}];\nst.global.b16 [%rd12], %rs2;"
    assert kinds(body.format(""), shared=128) == set()
    assert kinds(body.format("+2"), shared=128) == {"unwritten"}


def test_marks_go_through_shared_memory():
    through = "shl.b32 %r3, %r1, 2;\nst.shared.b32 [%r3], %r2;\nld.shared.b32 %r2, [%r3];"
    body = f"ld.global.b32 %r2, [%rd11];\n{through}\n{STORED}"
    assert kinds(body, shared=128) == {"unwritten"}
    assert kinds(body, shared=128, x=partly(32)) == set()


@pytest.mark.parametrize("row", [8, 4])
def test_marks_go_through_products_by_rows(row):
    """Rows of A that nobody wrote spoil those rows of the product alone."""
    body = f"""
    setp.lt.u32 %p1, %r1, {4 * row};
    ld.global.b32 %r2, [%rd11];
    mov.b32 %r3, 0;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%r4, %r5, %r6, %r7}}, {{%r2, %r3, %r3, %r3}}, {{%r3, %r3}},
      {{%r3, %r3, %r3, %r3}};
    selp.b32 %r2, %r4, 0, %p1;
    {STORED}
    st.global.b32 [%rd12], %r6;
    """
    assert kinds(body, x=partly(16)) == ({"unwritten"} if row == 8 else set())


def test_a_register_that_nothing_was_put_in():
    ran = run(f"{OWN}add.s32 %r2, %r9, 1;\n{STORED}", x=FRESH, y=NONE)
    assert ran.kinds == {"unwritten"}
    assert "register" in str(ran.faults[0])
    guarded = f"setp.lt.u32 %p1, %r1, {{}};\n@%p1 mov.b32 %r9, 5;\nmov.b32 %r2, %r9;\n{STORED}"
    assert run(OWN + guarded.format(16), x=FRESH, y=NONE).kinds == {"unwritten"}
    assert not run(OWN + guarded.format(32), x=FRESH, y=NONE).faults
    assert not run(f"{OWN}add.s32 %r2, %r9, 1;", x=FRESH, y=NONE).faults


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


def test_marks_end_with_their_storage():
    x = torch.empty(1000)
    mark(x)
    storage, bits = x.untyped_storage(), x.view(torch.int32)
    assert marks_of(storage) is not None
    bits[:] = 1
    assert marks_of(storage) is None


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
