"""Loads, stores, copies, shuffles and branches, and what is reported of wrong ones."""

import numpy as np
import pytest
from ptx_text import NONE, OWN, WORD, run, run_on_words


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
    body = f"""
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
    """
    ran = run(body, shared=1024, x=data, y=np.zeros(32 * size, "u1"))
    assert not ran.faults
    wanted = data.reshape(32, count, width)[:, ::-1].reshape(-1)
    assert ran["y"].tolist() == wanted.tolist()


def test_a_signed_byte_is_spread():
    ran = run_on_words("ld.global.s8 %r2, [%rd11];\nst.global.b32 [%rd12], %r2;", x=np.arange(112, 176, dtype="u4"))
    assert ran["y"].view("i4")[:32].tolist() == [*range(112, 128), *range(-128, -112)]


def test_a_guarded_load_keeps_what_was_there_and_touches_nothing():
    body = """
    setp.lt.u32 %p1, %r1, 5;
    add.s64 %rd11, %rd11, 240;
    mov.u32 %r2, 77;
    @%p1 ld.global.b32 %r2, [%rd11];
    @!%p1 st.global.b32 [%rd12], %r2;
    @%p1 st.global.b32 [%rd12], %r2;
    """
    ran = run_on_words(body)
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


def test_threads_that_end_early_touch_nothing_more():
    ran = run_on_words("setp.gt.u32 %p1, %r1, 9;\n@%p1 ret;\nadd.s64 %rd12, %rd12, 216;\nst.global.b32 [%rd12], %r1;")
    assert not ran.faults
    assert ran["y"][54:].tolist() == list(range(10))


# -------------------------------------------------------------------------------------------------------------- copies

COPY = """
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 4;
mul.wide.u32 %rd10, %r1, 16;
add.s64 %rd11, %rd1, %rd10;
add.s64 %rd12, %rd2, %rd10;
mov.b32 %r3, 16;
cp.async.cg.shared.global [%r2 + 0], [%rd11 + 0], 0x10, {size};
{lines}
ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2];
st.global.v4.b32 [%rd12], {{%r4, %r5, %r6, %r7}};
"""
COMMIT, WAIT = "cp.async.commit_group;\n", "cp.async.wait_group 0;\n"
SAME = "cp.async.ca.shared.global [%r2 + 8], [%rd11 + 0], 0x8, 8;\n"
BESIDE = "cp.async.ca.shared.global [%r2 + 512], [%rd11 + 0], 0x10, 16;\n"


def copies(lines: str, size: str = "%r3"):
    body = COPY.format(lines=lines, size=size)
    return run(body, shared=1024, x=np.arange(128, dtype="u4"), y=np.zeros(128, "u4"))


@pytest.mark.parametrize(
    "lines", [COMMIT, WAIT, COMMIT + "cp.async.wait_group 1;"], ids=["no wait", "not committed", "too few waited for"]
)
def test_a_copy_that_is_read_too_early(lines):
    ran = copies(lines)
    assert ran.kinds == {"unwritten"}
    assert ran["y"].tolist() != list(range(128))


@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        (COMMIT + WAIT, set()),
        (COMMIT + SAME + COMMIT + WAIT, {"race"}),  # which of the two arrives last is nowhere said
        (COMMIT + WAIT + SAME + COMMIT + WAIT, set()),
        (COMMIT + BESIDE + COMMIT + WAIT, set()),
    ],
)
def test_a_copy_has_arrived_after_the_wait_and_two_to_one_place_are_a_race(lines, kinds):
    ran = copies(lines)
    assert ran.kinds == kinds
    assert SAME in lines or ran["y"].tolist() == list(range(128))


def test_a_copy_of_fewer_bytes_is_filled_with_zeros():
    assert copies(COMMIT + WAIT, "8")["y"].reshape(-1, 4).tolist() == [[4 * t, 4 * t + 1, 0, 0] for t in range(32)]


# -------------------------------------------------------------------------------------------------- atomic operations

SCATTER = """
mov.u32 %r1, %tid.x;
and.b32 %r2, %r1, 7;
mad.wide.u32 %rd10, %r1, 4, %rd1;
mad.wide.u32 %rd11, %r2, 4, %rd2;
ld.global.b32 %r3, [%rd10];
"""
NUMBERS, ATOMIC = np.arange(64, dtype="f4"), "red.global.relaxed.add.f32 [%rd11 + 0], %r3;"


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
    lines = [more, ATOMIC] if first else [ATOMIC, more]
    ran = run(SCATTER + "\n".join(lines), threads=64, grid=(2, 1, 1), x=NUMBERS, out=np.ones(8, "f4"))
    assert bool(ran.kinds) == bool(kinds)
    assert ran.kinds <= kinds


# -------------------------------------------------------------------------------------------- scopes of inline assembly

SCOPES = """{ .reg .f32 f<2>;
cvt.rn.f32.u32 f0, %r1; mov.f32 f1, f0;
mov.b32 %r2, f1;
}
{ .reg .b32 s<2>; .reg .pred f0;
mov.b32 s1, 1;  // } and { in a comment close nothing
setp.eq.b32 f0, %r1, 0;
@f0 mov.b32 %r2, s1;
}
st.global.b32 [%rd12], %r2;"""


def test_registers_of_inline_assembly_end_with_its_brace():
    """The second scope has a name again, for another type."""
    ran = run_on_words(SCOPES)
    assert not ran.faults
    assert ran["y"][0] == 1
    assert ran["y"].view("f4")[1:32].tolist() == list(range(1, 32))


# --------------------------------------------------------------------------------------------------------------- races

PLACES = "shl.b32 %r2, %r1, 2;\nxor.b32 %r3, %r2, {};\n"
OWN_STORE, BAR, WARP = "st.shared.b32 [%r2], %r1;\n", "bar.sync 0;\n", "bar.warp.sync -1;\n"
LOAD, STORE_AGAIN = "ld.shared.b32 %r4, [%r3];\n", "st.shared.b32 [%r2], %r4;"
SPREAD = "and.b32 %r2, %r1, 28;\nst.shared.b32 [%r2], %r2;\n{}ld.shared.b32 %r3, [%r2];"
FOREIGN = "xor.b32 %r6, %r1, 32;\nmad.wide.u32 %rd13, %r6, 4, %rd1;\n"
GLOBAL_STORE, GLOBAL_LOAD = "st.global.b32 [%rd11], %r1;\n", "ld.global.b32 %r5, [%rd13];\n"
PAST_HALF = "setp.lt.u32 %p1, %r1, {};\n@%p1 bra $L__BB0_1;\n{}$L__BB0_1:\nst.global.b32 [%rd12], %r1;"


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        (PLACES.format(128) + OWN_STORE + BAR + LOAD + BAR + STORE_AGAIN, set()),
        (PLACES.format(128) + OWN_STORE + LOAD + BAR + STORE_AGAIN, {"race"}),
        (PLACES.format(128) + OWN_STORE + BAR + LOAD + STORE_AGAIN, {"race"}),
        (PLACES.format(128) + OWN_STORE + WARP + LOAD + BAR + STORE_AGAIN, {"race"}),  # another warp's
        (PLACES.format(4) + OWN_STORE + WARP + LOAD + WARP + STORE_AGAIN, set()),
        (PLACES.format(4) + OWN_STORE + LOAD + WARP + STORE_AGAIN, {"race"}),
        (SPREAD.format(WARP), {"race"}),  # the other warp's
        ("setp.gt.u32 %p1, %r1, 31;\n@%p1 ret;\n" + SPREAD.format(WARP), set()),  # no instruction races with itself
        ("setp.gt.u32 %p1, %r1, 31;\n@%p1 ret;\n" + SPREAD.format(""), {"race"}),
        # triton#10924: a store and the load after it take different layouts
        (FOREIGN + GLOBAL_STORE + BAR + GLOBAL_LOAD, set()),
        (FOREIGN + GLOBAL_STORE + GLOBAL_LOAD, {"race"}),
        (FOREIGN + GLOBAL_LOAD + BAR + GLOBAL_STORE, set()),
        (FOREIGN + GLOBAL_LOAD + GLOBAL_STORE, {"race"}),
    ],
)
def test_races_of_threads(body, kinds):
    ran = run_on_words(body, threads=64, shared=256)
    assert ran.kinds == kinds
    assert all(fault.other is not None for fault in ran.faults)


@pytest.mark.parametrize(("between", "kinds"), [("", {"race"}), (BAR, set())])
def test_two_warps_store_at_one_place_one_after_the_other(between, kinds):
    body = PLACES.format(128) + OWN_STORE + between + "st.shared.b32 [%r3], %r1;"
    assert run_on_words(body, threads=64, shared=256).kinds == kinds


@pytest.mark.parametrize(
    ("body", "shared", "kinds"),
    [
        ("st.shared.b32 [global_smem], %r1;", 4, {"value"}),  # threads store different values at one place
        ("st.shared.b32 [global_smem], 5;", 4, set()),
        ("shl.b32 %r2, %r1, 2;\nst.shared.b32 [%r2+4], %r1;", 128, {"bounds"}),  # memory ends where the launch says
        ("shl.b32 %r2, %r1, 3;\nst.shared.b32 [%r2+2], %r1;", 256, {"alignment"}),
        (PAST_HALF.format(7, BAR), 4, {"divergence"}),  # a barrier that not all threads reach
        (PAST_HALF.format(16, "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n"), 4, {"divergence"}),
    ],
)
def test_faults_of_a_warp(body, shared, kinds):
    assert run_on_words(body, shared=shared).kinds == kinds


@pytest.mark.parametrize(
    ("position", "kinds"),
    [("mad.lo.s32 %r4, %r3, 32, %r1", set()), ("mad.lo.s32 %r4, %r3, 31, %r1", {"programs"})],
)
def test_two_programs_store_at_one_place(position, kinds):
    ran = run(
        f"mov.u32 %r1, %tid.x;\nmov.u32 %r3, %ctaid.x;\n{position};\nmad.wide.u32 %rd10, %r4, 4, %rd1;\n"
        "st.global.b32 [%rd10], %r3;",
        grid=(2, 1, 1),
        y=NONE,
    )
    assert ran.kinds - {"value"} == kinds


@pytest.mark.parametrize("grid", [2, 1000])
def test_a_program_reads_what_another_wrote(grid):
    """Also where the two do not run in one chunk."""
    body = """
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %nctaid.x;
    sub.s32 %r4, %r4, %r3;
    sub.s32 %r4, %r4, 1;
    mad.wide.u32 %rd10, %r3, 4, %rd1;
    mad.wide.u32 %rd11, %r4, 4, %rd1;
    st.global.b32 [%rd10], %r3;
    ld.global.b32 %r5, [%rd11];
    """
    ran = run(body, grid=(grid, 1, 1), y=np.zeros(grid, "u4"))
    assert ran.kinds == {"programs"}


def test_copies_of_what_the_storing_thread_reads_are_only_noted():
    """Four warps load the same row, one stores it: a compiler's way with rows narrower than its threads."""
    body = """
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 31;
    mad.wide.u32 %rd11, %r2, 4, %rd1;
    setp.lt.u32 %p1, %r1, 32;
    ld.global.b32 %r5, [%rd11];
    @%p1 st.global.b32 [%rd11], %r5;
    """
    ran = run(body, threads=128, x=WORD)
    assert ran.kinds == {"redundant"}
