"""Branches of threads that part and meet again, parameters, and what is refused by name and line."""

import numpy as np
import pytest
from ptx_text import run

from ptx_check import Unsupported

OWN_WORD = "mov.u32 %r1, %tid.x;\nmad.wide.u32 %rd10, %r1, 4, %rd1;\n"
OUT_OF_LINE = """
mov.b32 %r2, %r1;
setp.gt.u32 %p1, %r1, 15;
@%p1 bra $L__SLOW;
$L__JOIN:
shfl.sync.bfly.b32 %r3, %r2, 31, 31, -1;
bar.sync 0;
st.global.b32 [%rd10], %r3;
ret;
$L__SLOW:
add.s32 %r2, %r2, 100;
bra.uni $L__JOIN;
"""
TRAPPED = """
setp.lt.u32 %p1, %r1, 8;
mov.b32 %r2, 5;
@!%p1 bra $L__MEET;
setp.gt.u32 %p2, %r1, 8;
@%p2 bra $L__FAIL;
mov.b32 %r2, 7;
$L__MEET:
shfl.sync.bfly.b32 %r3, %r2, 8, 31, -1;
st.global.b32 [%rd10], %r3;
ret;
$L__FAIL:
bra.uni $L__TRAP;
$L__TRAP:
trap;
"""
ELECTED = """
setp.lt.u32 %p1, %r1, 5;
@%p1 bra $L__END;
elect.sync %r2|%p2, 0xffffffe0;
selp.u32 %r3, 100, 0, %p2;
add.u32 %r3, %r3, %r2;
st.global.b32 [%rd10], %r3;
$L__END:
"""


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        # a part out of line stands behind the join: all threads wait for those that took it
        (OUT_OF_LINE, [t ^ 31 if t > 15 else (t ^ 31) + 100 for t in range(32)]),
        # eight threads go a way of their own, on which the ninth would fail; all others meet behind it
        (TRAPPED, [5] * 8 + [7] * 8 + [5] * 16),
        (ELECTED, [0] * 5 + [105] + [5] * 26),
    ],
    ids=["out of line", "trap", "elect"],
)
def test_threads_that_part_meet_where_all_their_ways_lead(body, wanted):
    ran = run(OWN_WORD + body, y=np.zeros(32, "u4"))
    assert not ran.faults
    assert ran["y"].tolist() == wanted


NESTED = """
mov.b32 %r2, 0;
mov.b32 %r3, 0;
$L__OUTER:
and.b32 %r4, %r1, 3;
mov.b32 %r5, 0;
bra.uni $L__TEST;
$L__BODY:
add.s32 %r2, %r2, 1;
add.s32 %r5, %r5, 1;
$L__TEST:
setp.lt.u32 %p1, %r5, %r4;
@%p1 bra $L__BODY;
shfl.sync.idx.b32 %r6, %r2, 3, 31, -1;
setp.eq.b32 %p2, %r1, 7;
@%p2 ret;
add.s32 %r3, %r3, 1;
setp.lt.u32 %p3, %r3, 2;
@%p3 bra $L__OUTER;
st.global.b32 [%rd10], %r2;
"""


def test_loops_within_loops_meet_after_each_round_and_threads_may_end_within():
    ran = run(OWN_WORD + NESTED, y=np.full(32, 99, "u4"))
    assert ran.kinds == {"divergence"}  # the second round's shfl lacks thread 7, which ended
    assert ran["y"].tolist() == [99 if t == 7 else 2 * (t % 4) for t in range(32)]


@pytest.mark.parametrize(
    ("kind", "load", "value", "wanted"),
    [
        ("u32", "ld.param.s32 %rd5, [probe_param_1]", -100, -100),
        ("u32", "ld.param.u32 %rd5, [probe_param_1]", -100, (1 << 32) - 100),
        ("u16", "ld.param.s16 %rd5, [probe_param_1]", -3, -3),
        ("u16", "ld.param.u16 %rd5, [probe_param_1]", -3, (1 << 16) - 3),
        ("u64", "ld.param.b64 %rd5, [probe_param_1]", -3, -3),
        ("u64", "ld.param.u32 %rd5, [probe_param_1+4]", 7 << 32 | 5, 7),
    ],
)
def test_a_signed_parameter_stays_signed_in_a_wider_register(kind, load, value, wanted):
    """ignore_index = -100 is an int32 that losses compare with 64-bit labels."""
    ran = run(f"{load};\nst.global.b64 [%rd1], %rd5;", scalars=[(kind, value)], out=np.zeros(1, "i8"))
    assert not ran.faults
    assert ran["out"] == wanted


@pytest.mark.parametrize("line", [
    "frobnicate.b32 %r1, %r2;", "max.sat.NaN.bf16x2 %r1, %r2, %r2;", "cvt.f32.e4m3 %r1, %r2;", "mov.b32 unknown, 1;",
    "ld.global.frob.b32 %r1, [%rd1];", "st.global.nc.b32 [%rd1], %r1;", "shfl.sync.frob.b32 %r1, %r2, 1, 31, -1;",
    "bar.frob 0;", "bar.arrive 1, 64;", "fence.frob;", "membar.frob;", "vote.sync.frob.pred %p1, %p2, -1;",
    "cp.async.frob_group;", "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r1}, [%r2];", "wgmma.frob.sync.aligned;",
    "prefetch.frob [%rd1];", "ret.frob;", "red.global.add.v2.f32 [%rd1], {%r2, %r2};",
    "tcgen05.cp.cta_group::1.128x256b [%r2], %rd1;", "mbarrier.arrive.shared::cta.b64 %rd1, [%r2];",
])  # fmt: skip
def test_what_no_list_has_is_refused_by_name_and_line(line):
    opcode = line.split(" ")[0].rstrip(";")
    with pytest.raises(Unsupported, match=rf"{opcode}[ ,].*probe, PTX line \d+$"):
        run(f"mov.u32 %r2, %tid.x;\n{line}", target="sm_90a", shared=1024, y=np.zeros(32, "u4"))
