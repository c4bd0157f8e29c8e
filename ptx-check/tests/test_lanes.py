"""Lanes of a warp that take part alone, and copies of a number that they store."""

import functools
import operator

import numpy as np
import pytest
from ptx_text import NONE, OWN, run

HALVES = """
setp.gt.u32 %p1, %r1, 15;
@%p1 bra $L__UPPER;
shfl.sync.down.b32 %r2, %r1, 1, 31, {lower};
vote.sync.ballot.b32 %r3, %p0, {lower};
bra.uni $L__JOIN;
$L__UPPER:
shfl.sync.bfly.b32 %r2, %r1, 1, 31, {upper};
vote.sync.ballot.b32 %r3, %p0, {upper};
$L__JOIN:
"""
OF_EACH = "and.b32 %r4, %r1, 15;\nsetp.lt.u32 %p2, %r4, 15;\nselp.b32 %r2, %r2, 7, %p2;\nst.global.b32 [%rd12], %r2;"


@pytest.mark.parametrize(
    ("lower", "upper", "kinds"),
    [
        ("0xffff", "0xffff0000", set()),
        ("0xffff", "0xff000000", {"divergence"}),  # lanes that are here and not named
        ("0x1ffff", "0xffff0000", {"divergence"}),  # a lane that is named and not here
        ("-1", "-1", {"divergence"}),
    ],
)
def test_half_of_a_warp_shuffles_and_votes_alone(lower, upper, kinds):
    """Lane 15's source, in the other half, is no fault where a select discards what it gives."""
    body = OWN + "setp.ne.b32 %p0, %r1, 3;" + HALVES.format(lower=lower, upper=upper) + OF_EACH
    ran = run(f"{body}\nst.global.b32 [%rd11], %r3;", x=NONE[:32], y=NONE[:32])
    assert ran.kinds - {"unwritten"} == kinds
    if not kinds:
        assert not ran.faults
        assert ran["x"].tolist() == [0xFFF7] * 16 + [0xFFFF0000] * 16
        assert ran["y"].tolist() == [*range(1, 16), 7, *(t ^ 1 for t in range(16, 31)), 7]


def test_a_shuffle_from_a_lane_that_takes_no_part_gives_what_nobody_wrote():
    body = OWN + "setp.ne.b32 %p0, %r1, 3;" + HALVES.format(lower="0xffff", upper="0xffff0000")
    ran = run(f"{body}\nst.global.b32 [%rd12], %r2;", x=NONE[:32], y=NONE[:32])
    assert ran.kinds == {"unwritten"}


@pytest.mark.parametrize(("mask", "kinds"), [("0xffff", set()), ("0xffff0000", {"race", "divergence"})])
def test_a_barrier_of_half_a_warp_orders_its_lanes_alone(mask, kinds):
    body = f"""{OWN}
    setp.gt.u32 %p1, %r1, 15;
    @%p1 bra $L__END;
    shl.b32 %r2, %r1, 2;
    xor.b32 %r3, %r2, 4;
    st.shared.b32 [%r2], %r1;
    bar.warp.sync {mask};
    ld.shared.b32 %r4, [%r3];
    st.global.b32 [%rd12], %r4;
    $L__END:"""
    ran = run(body, x=NONE[:32], y=NONE[:32], shared=64)
    assert ran.kinds == kinds


@pytest.mark.parametrize("place", ["shared.{} [global_smem]", "global.{} [%rd1]"])
@pytest.mark.parametrize(
    ("kind", "first", "step", "found"),
    [
        ("b32", 0x3F800000, 8, "rounding"),  # 1.0 and the eighth number from it
        ("b32", 0x3F800000, 9, "value"),
        ("b32", 0x3C003C00, 0x10001, "rounding"),  # two halves, each by one digit
        ("b32", 0x3C003C00, 0x20000, "value"),
        ("b32", 5, 1, "value"),  # whole numbers
        ("b16", 0x3C00, 1, "rounding"),
        ("b16", 0x3C00, 2, "value"),
        ("b64", 0x3FF0000000000000, 3, "rounding"),
        ("b64", 0x3FF0000000000000, 1 << 32, "value"),
        ("b8", 0x41, 1, "value"),
    ],
)
def test_copies_of_a_number_that_differ_in_the_last_bits_are_noted(place, kind, first, step, found):
    """One thread computes it by fma and another does not."""
    register = {"b8": "%rs1", "b16": "%rs1", "b32": "%r2", "b64": "%rd9"}[kind]
    whole = "b16" if kind == "b8" else kind
    body = f"""
    mov.u32 %r1, %tid.x;
    setp.eq.b32 %p1, %r1, 5;
    mov.{whole} {register}, {first};
    @%p1 mov.{whole} {register}, {first + step};
    st.{place.format(kind)}, {register};"""
    assert run(body, shared=8, x=NONE).kinds == {found}


REDUCED = {
    "add.s32": sum,
    "add.u32": sum,
    "min.s32": min,
    "max.s32": max,
    "min.u32": lambda x: min(v & 0xFFFFFFFF for v in x),
    "max.u32": lambda x: max(v & 0xFFFFFFFF for v in x),
    "and.b32": lambda x: functools.reduce(operator.and_, x),
    "or.b32": lambda x: functools.reduce(operator.or_, x),
    "xor.b32": lambda x: functools.reduce(operator.xor, x),
}


@pytest.mark.parametrize("form", REDUCED)
def test_a_warp_reduces_to_one_number(form):
    x = np.random.default_rng(1).integers(-(2**31), 2**31, 64).astype("i4")
    halves = f"""
    setp.gt.u32 %p1, %r2, 15;
    @%p1 bra $L__UPPER;
    redux.sync.{form} %r4, %r3, 0xffff;
    bra.uni $L__JOIN;
    $L__UPPER:
    redux.sync.{form} %r4, %r3, 0xffff0000;
    $L__JOIN:"""
    for lanes, body in ((32, f"redux.sync.{form} %r4, %r3, -1;"), (16, halves)):
        load = f"{OWN}and.b32 %r2, %r1, 31;\nld.global.b32 %r3, [%rd11];\n{body}\nst.global.b32 [%rd12], %r4;"
        ran = run(load, threads=64, x=x, y=NONE)
        assert not ran.faults
        wanted = [REDUCED[form](x[first : first + lanes].tolist()) & 0xFFFFFFFF for first in range(0, 64, lanes)]
        assert ran["y"].tolist() == np.repeat(wanted, lanes).tolist()


def test_lanes_that_run():
    body = (
        f"{OWN}setp.gt.u32 %p1, %r1, 4;\n@%p1 bra $L__END;\nactivemask.b32 %r2;\nst.global.b32 [%rd12], %r2;\n$L__END:"
    )
    assert run(body, x=NONE, y=NONE)["y"][:6].tolist() == [31] * 5 + [0]


@pytest.mark.parametrize("form", ["min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32", "min.abs.f32", "max.abs.NaN.f32"])
def test_reductions_of_float32(form):
    """Without .NaN a number is less, and more, than what is none."""
    x = np.array([*range(-20, 12), *([np.nan] * 32), *([1.5, np.nan, -7.0, 2.0] * 8)], "f4")
    load = f"{OWN}ld.global.b32 %r3, [%rd11];\nredux.sync.{form} %r4, %r3, -1;\nst.global.b32 [%rd12], %r4;"
    ran = run(load, threads=96, target="sm_100a", x=x, y=np.zeros(96, "f4"))
    assert not ran.faults
    for first in (0, 32, 64):
        given = np.abs(x[first : first + 32]) if "abs" in form else x[first : first + 32]
        numbers = given if "NaN" in form else given[~np.isnan(given)]
        wanted = np.nan if not numbers.size else numbers.min() if form.startswith("min") else numbers.max()
        np.testing.assert_array_equal(ran["y"][first : first + 32], np.full(32, wanted, "f4"))
