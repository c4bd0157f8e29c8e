"""Teams of warps: named barriers, branches by a table, registers handed over, and races between teams."""

import numpy as np
import pytest
from ptx_text import run_on_words

from ptx_check import Unsupported

OWN_STORE, OTHERS_LOAD, OTHERS_STORE = (
    "st.shared.b32 [%r2], %r1;", "ld.shared.b32 %r4, [%r3];", "st.shared.b32 [%r3], %r2;"
)  # fmt: skip
"""Of a thread's own word, and of that of a neighbour."""


@pytest.mark.parametrize(
    ("sync", "distance", "right"),
    [("bar.sync 1, 64;", 32, True), ("bar.sync 1;", 1, True), ("bar.warp.sync -1;", 32, False), ("", 1, False)],
)
def test_a_barrier_orders_shared_memory_between_warps_and_in_one(sync, distance, right):
    places = f"shl.b32 %r2, %r1, 2;\nadd.s32 %r3, %r1, {distance};\nand.b32 %r3, %r3, 63;\nshl.b32 %r3, %r3, 2;"
    for lines in ([OWN_STORE, sync, OTHERS_LOAD], [OWN_STORE, "bar.sync 3, 64;", OTHERS_LOAD, sync, OWN_STORE],
                  [OWN_STORE, sync, OTHERS_STORE]):  # fmt: skip
        text = "\n".join([places, "bar.sync 3, 64;", *lines])
        assert run_on_words(text, threads=64, shared=256).kinds == (set() if right else {"race"})


BY_TABLE = """
mov.b32 %r3, 30;
shr.u32 %r2, %r1, 5;
table: .branchtargets $L__BB0_1, $L__BB0_2, $L__BB0_3;
brx.idx %r2, table;
$L__BB0_1:
mov.b32 %r3, 10;
bar.sync 1, 64;
bra.uni $L__BB0_3;
$L__BB0_2:
mov.b32 %r3, 20;
bar.sync 1, 64;
$L__BB0_3:
bar.sync 2, 96;
st.global.b32 [%rd12], %r3;
"""
WORDS = np.arange(96, dtype="u4")


def test_a_table_of_branches_parts_warps_which_meet_at_barriers():
    ran = run_on_words(BY_TABLE, threads=96, x=WORDS, y=np.zeros(96, "u4"))
    assert not ran.faults
    assert (ran["y"] == np.repeat([10, 20, 30], 32)).all()
    with pytest.raises(Unsupported, match="within a warp"):
        run_on_words(BY_TABLE.replace("shr.u32 %r2, %r1, 5", "and.b32 %r2, %r1, 1"), threads=96, x=WORDS)


@pytest.mark.parametrize(
    ("line", "by", "kinds", "told"),
    [
        ("bar.sync 1, 64;\nbra", "bar.sync 4, 64;\nbra", {"deadlock"}, "warp 0 waits for barrier 4, at which 32 of 64"),
        ("bar.sync 2, 96", "bar.sync 2, 64", {"divergence"}, "96 threads come to barrier 2, which takes 64"),
    ],
)
def test_barriers_that_do_not_fit_are_told(line, by, kinds, told):
    ran = run_on_words(BY_TABLE.replace(line, by), threads=96, x=WORDS, y=np.zeros(96, "u4"))
    assert ran.kinds == kinds
    assert told in ran.faults[0].message


@pytest.mark.parametrize(("given", "kinds"), [(248, set()), (255, {"deadlock"})])
def test_registers_are_there_when_others_give_them_back(given, kinds):
    text = f"""
    setp.lt.u32 %p1, %r1, 128;
    @%p1 bra $L__BB0_1;
    setmaxnreg.dec.sync.aligned.u32 {given};
    bra.uni $L__BB0_2;
    $L__BB0_1:
    setmaxnreg.inc.sync.aligned.u32 256;
    $L__BB0_2:
    st.global.b32 [%rd12], %r1;
    """
    words = np.zeros(256, "u4")
    assert run_on_words(text, threads=256, x=words, y=words).kinds == kinds


def test_copies_by_threads_of_a_specialised_kernel_are_refused_by_name():
    copy = "cp.async.cg.shared.global [global_smem], [%rd11], 16;\nbar.sync 1, 64;"
    with pytest.raises(Unsupported, match="a warp-specialised kernel, at probe, PTX line"):
        run_on_words(copy, threads=64, shared=256)


ARRIVAL = "@%p2 mbarrier.arrive.shared::cta.b64 _, [global_smem+256];"


@pytest.mark.parametrize(("early", "late", "kinds"), [("", ARRIVAL, set()), (ARRIVAL, "", {"race"}),
                                                      ("", "", {"deadlock"})])  # fmt: skip
def test_an_arrival_orders_what_came_before_it_for_those_who_wait(early, late, kinds):
    text = f"""
    shl.b32 %r2, %r1, 2;
    setp.eq.u32 %p2, %r1, 0;
    @%p2 mbarrier.init.shared::cta.b64 [global_smem+256], 1;
    bar.sync 3, 64;
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra $L__BB0_1;
    waiting:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [global_smem+256], 0;
    @!%p3 bra.uni waiting;
    ld.shared.b32 %r4, [%r2+-128];
    bra.uni $L__BB0_2;
    $L__BB0_1:
    {early}
    st.shared.b32 [%r2], %r1;
    bar.warp.sync -1;
    {late}
    mov.b32 %r4, 5;
    $L__BB0_2:
    st.global.b32 [%rd12], %r4;
    """
    ran = run_on_words(text, threads=64, shared=512)
    assert ran.kinds == kinds
    assert kinds or (ran["y"] == np.r_[np.full(32, 5), np.arange(32)]).all()
