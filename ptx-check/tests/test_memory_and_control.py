"""Loads, stores, copies, shuffles and branches, and what is reported of wrong ones."""

import numpy as np
import pytest
from ptx_text import NONE, OWN, WORD, run, run_on_words

from ptx_check import Unsupported


@pytest.mark.parametrize(("words", "width"), [("b8", 1), ("b16", 2), ("b32", 4), ("b64", 8)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_vectors_of_every_width_come_in_order(words, width, count):
    if width * count > 16:
        return
    kind = {"b8": "rs", "b16": "rs", "b32": "r", "b64": "rd"}[words]
    names = [f"%{kind}{20 + i}" for i in range(count)]
    registers = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    turned = names[0] if count == 1 else "{" + ", ".join(reversed(names)) + "}"
    vector = "" if count == 1 else f".v{count}"
    size = width * count
    data = np.random.default_rng(0).integers(0, 256, 32 * size).astype("u1")
    ran = run(
        f"""
        mov.u32 %r1, %tid.x;
        mad.wide.u32 %rd10, %r1, {size}, %rd1;
        mad.wide.u32 %rd11, %r1, {size}, %rd2;
        mad.lo.s32 %r2, %r1, {size}, 16;
        mov.b32 %r3, global_smem;
        add.s32 %r3, %r3, %r2;
        ld.global{vector}.{words} {registers}, [%rd10];
        st.shared{vector}.{words} [%r3], {turned};
        bar.sync 0;
        ld.shared{vector}.{words} {registers}, [%r3+0];
        st.global{vector}.{words} [%rd11+0], {registers};
        """,
        shared=1024,
        x=data,
        y=np.zeros(32 * size, "u1"),
    )
    assert not ran.faults
    wanted = data.reshape(32, count, width)[:, ::-1].reshape(-1)
    assert ran["y"].tolist() == wanted.tolist()


def test_a_signed_byte_is_spread():
    ran = run(
        """
        mov.u32 %r1, %tid.x;
        cvt.u64.u32 %rd10, %r1;
        add.s64 %rd10, %rd10, %rd1;
        mad.wide.u32 %rd11, %r1, 4, %rd2;
        ld.global.s8 %r2, [%rd10];
        st.global.b32 [%rd11], %r2;
        """,
        x=np.arange(112, 144).astype("u1"),
        y=np.zeros(32, "u4"),
    )
    assert ran["y"].view("i4").tolist() == [*range(112, 128), *range(-128, -112)]


def test_a_guarded_load_keeps_what_was_there_and_touches_nothing():
    ran = run_on_words(
        """
        setp.lt.u32 %p1, %r1, 5;
        add.s64 %rd11, %rd11, 240;
        mov.u32 %r2, 77;
        @%p1 ld.global.b32 %r2, [%rd11];
        @!%p1 st.global.b32 [%rd12], %r2;
        @%p1 st.global.b32 [%rd12], %r2;
        """
    )
    assert ran.kinds == {"bounds"}  # thread 4 alone reads past the end
    assert ran["y"][:32].tolist() == [1060, 1061, 1062, 1063, ran["y"][4], *[77] * 27]


@pytest.mark.parametrize(("offset", "guard", "kinds"), [(0, "", set()), (1 << 20, "", {"bounds"}),
                         (-(1 << 20), "", {"bounds"}), (2, "", {"alignment", "bounds"}),
                         (1 << 40, "@!%p2 ", set())])  # fmt: skip
@pytest.mark.parametrize("access", ["ld.global.b32 %r2, [%rd12]", "st.global.b32 [%rd12], %r1"])
def test_accesses_outside_of_the_tensors_or_across_their_words(offset, guard, kinds, access):
    ran = run(f"{OWN}setp.lt.u32 %p2, %r1, 99;\nadd.s64 %rd12, %rd12, {offset};\n{guard}{access};", x=WORD, y=WORD[:32])
    assert ran.kinds == kinds
    for fault in ran.faults:
        assert fault.location.kernel == "probe"
        assert fault.location.line > 10


def test_shared_memory_ends_where_the_launch_says():
    ran = run("mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 2;\nst.shared.b32 [%r2+4], %r1;", shared=128)
    assert ran.kinds == {"bounds"}
    ran = run("mov.u32 %r1, %tid.x;\nshl.b32 %r2, %r1, 1;\nst.shared.b32 [%r2], %r1;", shared=128)
    assert "alignment" in ran.kinds


# ---------------------------------------------------------------------------------------------------------- shuffles


@pytest.mark.parametrize(
    ("form", "source"),
    [
        ("bfly.b32 %r2, %r1, 1, 31, -1", lambda lane: lane ^ 1),
        ("bfly.b32 %r2, %r1, 16, 31, -1", lambda lane: lane ^ 16),
        ("idx.b32 %r2, %r1, 3, 31, -1", lambda lane: 3),
        ("idx.b32 %r2, %r1, %r9, 31, -1", lambda lane: (7 * lane + 3) % 32),
        ("up.b32 %r2, %r1, 2, 0, -1", lambda lane: lane - 2 if lane >= 2 else lane),
        ("down.b32 %r2, %r1, 2, 31, -1", lambda lane: lane + 2 if lane + 2 < 32 else lane),
        ("idx.b32 %r2, %r1, 1, 0x181f, -1", lambda lane: lane // 8 * 8 + 1),  # segments of 8
    ],
)
def test_shuffles_within_a_warp(form, source):
    ran = run_on_words(
        f"mad.lo.s32 %r9, %r1, 7, 3;\nand.b32 %r9, %r9, 31;\nshfl.sync.{form};\nst.global.b32 [%rd12], %r2;", threads=64
    )
    assert not ran.faults
    assert ran["y"].tolist() == [t // 32 * 32 + source(t % 32) for t in range(64)]


# ------------------------------------------------------------------------------------------------- control and grids


def test_loops_and_branches_that_threads_take_apart():
    """Each thread sums 1 .. its number; odd ones are doubled."""
    ran = run_on_words(
        """
        mov.b32 %r2, 0;
        mov.b32 %r3, 0;
        $L__BB0_1:
        setp.ge.u32 %p1, %r3, %r1;
        @%p1 bra $L__BB0_2;
        add.s32 %r3, %r3, 1;
        add.s32 %r2, %r2, %r3;
        bra.uni $L__BB0_1;
        $L__BB0_2:
        and.b32 %r4, %r1, 1;
        setp.eq.b32 %p2, %r4, 0;
        @%p2 bra $L__BB0_3;
        shl.b32 %r2, %r2, 1;
        $L__BB0_3:
        st.global.b32 [%rd12], %r2;
        """,
        threads=64,
    )
    assert not ran.faults
    assert ran["y"].tolist() == [t * (t + 1) // 2 * (1 + t % 2) for t in range(64)]


def test_threads_that_end_early_touch_nothing_more():
    ran = run_on_words("setp.gt.u32 %p1, %r1, 9;\n@%p1 ret;\nadd.s64 %rd12, %rd12, 216;\nst.global.b32 [%rd12], %r1;")
    assert not ran.faults
    assert ran["y"][54:].tolist() == list(range(10))


def test_programs_of_a_grid_know_their_place():
    ran = run(
        """
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, %ctaid.y;
        mov.u32 %r3, %ctaid.z;
        mov.u32 %r4, %nctaid.x;
        mov.u32 %r5, %nctaid.y;
        mad.lo.s32 %r6, %r3, %r5, %r2;
        mad.lo.s32 %r6, %r6, %r4, %r1;
        mul.lo.s32 %r7, %r3, 100;
        mad.lo.s32 %r7, %r2, 10, %r7;
        add.s32 %r7, %r7, %r1;
        mad.wide.u32 %rd10, %r6, 4, %rd1;
        st.global.b32 [%rd10], %r7;
        """,
        grid=(3, 4, 2),
        y=np.zeros(24, "u4"),
    )
    assert not ran.faults
    assert ran["y"].tolist() == [100 * z + 10 * y + x for z in range(2) for y in range(4) for x in range(3)]


# -------------------------------------------------------------------------------------------------------------- copies

COPY = """
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 4;
mul.wide.u32 %rd10, %r1, 16;
add.s64 %rd11, %rd1, %rd10;
add.s64 %rd12, %rd2, %rd10;
mov.b32 %r3, 16;
"""


def copies(*lines, sizes="%r3"):
    return run(
        COPY
        + f"cp.async.cg.shared.global [%r2 + 0], [%rd11 + 0], 0x10, {sizes};\n"
        + "\n".join(lines)
        + "\nld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];\nst.global.v4.b32 [%rd12], {%r4, %r5, %r6, %r7};",
        shared=1024,
        x=np.arange(128, dtype="u4"),
        y=np.zeros(128, "u4"),
    )


def test_a_copy_has_arrived_after_the_wait():
    ran = copies("cp.async.commit_group;", "cp.async.wait_group 0;")
    assert not ran.faults
    assert ran["y"].tolist() == list(range(128))


@pytest.mark.parametrize(
    "lines",
    [("cp.async.commit_group;",), ("cp.async.wait_group 0;",), ("cp.async.commit_group;", "cp.async.wait_group 1;")],
    ids=["no wait", "not committed", "too few waited for"],
)
def test_a_copy_that_is_read_too_early(lines):
    ran = copies(*lines)
    assert ran.kinds == {"unwritten"}
    assert ran["y"].tolist() != list(range(128))


def test_a_copy_of_fewer_bytes_is_filled_with_zeros():
    ran = copies("cp.async.commit_group;", "cp.async.wait_group 0;", sizes="8")
    assert ran["y"].reshape(-1, 4).tolist() == [[4 * t, 4 * t + 1, 0, 0] for t in range(32)]


@pytest.mark.parametrize("waited", [False, True])
def test_a_copy_to_where_another_is_on_its_way(waited):
    """Which of the two arrives last is nowhere said."""
    repeated = "cp.async.ca.shared.global [%r2 + 8], [%rd11 + 0], 0x8, 8;"
    wait = "cp.async.wait_group 0;"
    ran = copies("cp.async.commit_group;", wait if waited else "", repeated, "cp.async.commit_group;", wait)
    assert ran.kinds == (set() if waited else {"race"})


def test_copies_side_by_side_are_ordered_by_nothing_and_need_not_be():
    beside = "cp.async.ca.shared.global [%r2 + 512], [%rd11 + 0], 0x10, 16;"
    assert not copies("cp.async.commit_group;", beside, "cp.async.commit_group;", "cp.async.wait_group 0;").faults


# -------------------------------------------------------------------------------------------------- atomic operations

SCATTER = """
mov.u32 %r1, %tid.x;
and.b32 %r2, %r1, 7;
mad.wide.u32 %rd10, %r1, 4, %rd1;
mad.wide.u32 %rd11, %r2, 4, %rd2;
ld.global.b32 %r3, [%rd10];
"""
NUMBERS = np.arange(64, dtype="f4")


@pytest.mark.parametrize("opcode", ["atom.global.gpu.acq_rel.{} %r4,", "red.global.relaxed.{}"])
@pytest.mark.parametrize(
    ("operation", "x", "out", "wanted"),
    [
        ("add.f32", NUMBERS, np.ones(8, "f4"), lambda x: 1 + 3 * x.reshape(8, 8).sum(0)),
        ("max.s32", NUMBERS.astype("i4") - 99, np.full(8, -50, "i4"), lambda x: x.reshape(8, 8).max(0).clip(-50)),
        ("xor.b32", NUMBERS.astype("u4"), np.zeros(8, "u4"), lambda x: np.bitwise_xor.reduce(x.reshape(8, 8), 0)),
    ],
)
def test_atomic_operations_of_threads_and_programs_meet(opcode, operation, x, out, wanted):
    """test_atomics.py has every operation, of one program."""
    body = SCATTER + f"{opcode.format(operation)} [%rd11 + 0], %r3;"
    ran = run(body, threads=64, grid=(3, 1, 1), x=x, out=out)
    assert not ran.faults
    assert ran["out"].tolist() == wanted(x).tolist()


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ("ld.global.b32 %r5, [%rd11];", {"race", "programs"}),
        ("st.global.b32 [%rd11], 0;", {"race", "programs"}),
        ("ld.global.b32 %r5, [%rd10];", set()),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_plain_access_beside_atomic_ones_is_a_race(more, kinds, first):
    atomic = "red.global.add.f32 [%rd11], %r3;"
    lines = [more, atomic] if first else [atomic, more]
    ran = run(SCATTER + "\n".join(lines), threads=64, grid=(2, 1, 1), x=NUMBERS, out=np.ones(8, "f4"))
    assert bool(ran.kinds) == bool(kinds)
    assert ran.kinds <= kinds


def test_atomic_operations_that_are_refused():
    with pytest.raises(Unsupported, match="is not executed by this machine, at probe"):
        run(SCATTER + "red.global.add.v2.f32 [%rd11], {%r3, %r3};", x=NUMBERS, out=NUMBERS)


# -------------------------------------------------------------------------------------------- scopes of inline assembly

BYTES_TO_BF16 = """
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd10, %r1, 4, %rd1;
mad.wide.u32 %rd11, %r1, 8, %rd2;
ld.global.b32 %r4, [%rd10];
{
.reg .s8 s<4>;
.reg .f32 f<4>;
mov.b32 {s0, s1, s2, s3}, %r4;
cvt.rn.f32.s8 f0, s0; cvt.rn.f32.s8 f1, s1; cvt.rn.f32.s8 f2, s2; cvt.rn.f32.s8 f3, s3;
prmt.b32 %r2, f0, f1, 0x7632;
prmt.b32 %r3, f2, f3, 0x7632;
}
{ .reg .b32 s<2>; .reg .pred f0;
mov.b32 s1, 1;  // } and { in a comment close nothing
setp.eq.b32 f0, %r1, 0;
@!f0 st.global.v2.b32 [%rd11], {%r2, %r3};
@f0 st.global.v2.b32 [%rd11], {s1, s1};
}
"""


def test_registers_of_inline_assembly_end_with_its_brace():
    """Triton's own way from int8 to bfloat16; the second scope has the names again, for other types."""
    x = np.arange(-64, 64, dtype="i1")
    ran = run(BYTES_TO_BF16, x=x, out=np.zeros(64, "u4"))
    assert not ran.faults
    assert ran["out"][:2].tolist() == [1, 1]
    bf16 = ran["out"].view("u2")[4:].astype("u4") << 16
    assert bf16.view("f4").tolist() == x[4:].tolist()


def test_a_result_that_is_no_register_is_refused_by_line():
    with pytest.raises(Unsupported, match=r"mov\.b32 that is no register, at probe, PTX line"):
        run("mov.b32 unknown, 1;")


# --------------------------------------------------------------------------------------------------------------- races

SWAP = """
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
xor.b32 %r3, %r2, {distance};
st.shared.b32 [%r2], %r1;
{sync}
ld.shared.b32 %r4, [%r3];
{after}
st.shared.b32 [%r2], %r4;
"""


@pytest.mark.parametrize(
    ("sync", "after", "distance", "kinds"),
    [
        ("bar.sync 0;", "bar.sync 0;", 128, set()),
        ("", "bar.sync 0;", 128, {"race"}),
        ("bar.sync 0;", "", 128, {"race"}),
        ("bar.warp.sync -1;", "bar.sync 0;", 128, {"race"}),  # another warp's
        ("bar.warp.sync -1;", "bar.warp.sync -1;", 4, set()),
        ("", "bar.warp.sync -1;", 4, {"race"}),
    ],
)
def test_races_on_shared_memory(sync, after, distance, kinds):
    ran = run(SWAP.format(sync=sync, after=after, distance=distance), threads=64, shared=256)
    assert ran.kinds == kinds
    assert all(fault.other is not None for fault in ran.faults)


def test_threads_that_store_different_values_at_one_place():
    assert run("mov.u32 %r1, %tid.x;\nst.shared.b32 [global_smem], %r1;", shared=4).kinds == {"value"}
    assert not run("mov.u32 %r1, 5;\nst.shared.b32 [global_smem], %r1;", shared=4).faults


@pytest.mark.parametrize(("between", "kinds"), [("", {"race"}), ("bar.sync 0;", set())])
def test_two_warps_store_at_one_place_one_after_the_other(between, kinds):
    stores = """
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
xor.b32 %r3, %r2, 128;
st.shared.b32 [%r2], %r1;
{}
st.shared.b32 [%r3], %r1;
"""
    assert run(stores.format(between), threads=64, shared=256).kinds == kinds


def test_copies_that_threads_of_a_warp_store_together_are_no_race():
    """Nor when the warp meets afterwards: an instruction is not compared with itself."""
    spread = "mov.u32 %r1, %tid.x;\nand.b32 %r2, %r1, 28;\nst.shared.b32 [%r2], %r2;\n{}ld.shared.b32 %r3, [%r2];"
    assert not run(spread.format("bar.warp.sync -1;\n"), shared=32).faults
    assert run(spread.format(""), shared=32).kinds == {"race"}


@pytest.mark.parametrize(
    ("position", "kinds"),
    [("mad.lo.s32 %r4, %r3, 32, %r1", set()), ("mov.u32 %r4, %r1", {"programs", "value"}),
     ("mad.lo.s32 %r4, %r3, 31, %r1", {"programs", "value"})],
)  # fmt: skip
def test_two_programs_store_at_one_place(position, kinds):
    ran = run(
        f"mov.u32 %r1, %tid.x;\nmov.u32 %r3, %ctaid.x;\n{position};\nmad.wide.u32 %rd10, %r4, 4, %rd1;\n"
        "st.global.b32 [%rd10], %r3;",
        grid=(2, 1, 1),
        y=NONE,
    )
    assert ran.kinds - {"value"} == kinds - {"value"}


@pytest.mark.parametrize("grid", [2, 1000])
def test_a_program_reads_what_another_wrote(grid):
    """Also where the two do not run in one chunk."""
    ran = run(
        """
        mov.u32 %r3, %ctaid.x;
        mov.u32 %r4, %nctaid.x;
        sub.s32 %r4, %r4, %r3;
        sub.s32 %r4, %r4, 1;
        mad.wide.u32 %rd10, %r3, 4, %rd1;
        mad.wide.u32 %rd11, %r4, 4, %rd1;
        st.global.b32 [%rd10], %r3;
        ld.global.b32 %r5, [%rd11];
        """,
        grid=(grid, 1, 1),
        y=np.zeros(grid, "u4"),
    )
    assert ran.kinds == {"programs"}


@pytest.mark.parametrize(("sync", "kinds"), [("bar.sync 0;", set()), ("", {"race"})])
@pytest.mark.parametrize("first", ["st", "ld"])
def test_threads_of_a_program_exchange_through_global_memory(sync, kinds, first):
    """triton#10924: a store and the load after it take different layouts."""
    store, load = "st.global.b32 [%rd11], %r1;", "ld.global.b32 %r5, [%rd13];"
    before, after = (store, load) if first == "st" else (load, store)
    ran = run(f"{OWN}xor.b32 %r6, %r1, 32;\nmad.wide.u32 %rd13, %r6, 4, %rd1;\n{before}\n{sync}\n{after}",
              threads=64, x=WORD, y=NONE)  # fmt: skip
    assert ran.kinds == kinds


def test_copies_of_what_the_storing_thread_reads_are_only_noted():
    """Four warps load the same row, one stores it: a compiler's way with rows narrower than its threads."""
    ran = run(
        """
        mov.u32 %r1, %tid.x;
        and.b32 %r2, %r1, 31;
        mad.wide.u32 %rd11, %r2, 4, %rd1;
        setp.lt.u32 %p1, %r1, 32;
        ld.global.b32 %r5, [%rd11];
        @%p1 st.global.b32 [%rd11], %r5;
        """,
        threads=128,
        x=WORD,
    )
    assert ran.kinds == {"redundant"}


def test_a_barrier_that_not_all_threads_reach():
    early = "setp.lt.u32 %p1, %r1, 7;\n@%p1 bra $L__BB0_1;\nbar.sync 0;\n$L__BB0_1:\nst.global.b32 [%rd12], %r1;"
    ran = run_on_words(early)
    assert ran.kinds == {"divergence"}


def test_a_shuffle_that_half_a_warp_reaches():
    ran = run(f"{OWN}setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $L__BB0_1;\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n"
              "$L__BB0_1:\nst.global.b32 [%rd12], %r1;", x=WORD, y=NONE)  # fmt: skip
    assert ran.kinds == {"divergence"}


def test_faults_name_the_python_line():
    text = ".loc 1 12 4 // mine.py:12:4 @[ mine.py:30:8 ]\nst.global.b32 [%rd12+1073741824], %r1;"
    fault = run_on_words(text).faults[0]
    assert fault.location.python == "mine.py:12:4 @[ mine.py:30:8 ]"
    assert "probe, PTX line" in str(fault)


@pytest.mark.parametrize("line", ["tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;",
                                  "mbarrier.arrive.shared::cta.b64 %rd1, [%r1];", "bar.arrive 1, 64;"])  # fmt: skip
def test_what_the_machine_has_not_is_refused_by_name(line):
    with pytest.raises(Unsupported, match=line.split(" ")[0]):
        run(f"mov.u32 %r1, %tid.x;\n{line}", shared=64)
