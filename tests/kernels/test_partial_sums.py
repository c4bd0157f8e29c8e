"""Sums of parts: any number of parts, many sums in one launch, each rounded once to its own dtype."""

import threading

import pytest
import torch

from fasttfm.functional.attention.operator import OPERATOR as ATTENTION
from fasttfm.functional.feed_forward import OPERATOR as FEED_FORWARD
from fasttfm.functional.operator import Inner
from fasttfm.functional.residual_norm import OPERATOR as RESIDUAL_NORM
from fasttfm.kernels.chip import INTERPRETER
from fasttfm.kernels.partial_sums import Sums, one_launch
from fasttfm.kernels.proof.launch_log import LaunchLog

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")


def sums_of(*parts, dtypes=None):
    """Sums of all of these."""
    dtypes = [torch.float32] * len(parts) if dtypes is None else dtypes
    return Sums(range(len(parts)), [each.shape for each in parts], dtypes, INTERPRETER)


def launches(log):
    return log.triton["partial_sums._add_parts"]


@pytest.mark.parametrize("programs", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("columns", [1, 32, 75])
def test_every_part_counts_once_whatever_their_number(programs, columns):
    parts, out = torch.randn(programs, columns), torch.full((columns,), 9.0)
    sums_of(parts)([parts], [out])
    torch.testing.assert_close(out, parts.double().sum(0).float(), atol=1e-5, rtol=1e-5)


def test_sums_of_different_sizes_and_dtypes_do_not_mix():
    sizes = [(3, 40, torch.float32), (70, 7, torch.bfloat16), (1, 100, torch.float32), (33, 64, torch.bfloat16)]
    parts = [torch.randn(p, n) for p, n, _ in sizes]
    for given, out in zip(parts, sums_of(*parts, dtypes=[dtype for *_, dtype in sizes])(parts)):
        # the interpreter truncates to bfloat16 where a GPU rounds: one unit in the last place
        rtol = 2**-7 if out.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.double(), given.double().sum(0), atol=1e-5, rtol=rtol)


@pytest.mark.parametrize("together", [False, True])
def test_more_sums_than_a_launch_takes(together):
    parts = [torch.randn(2, 3) for _ in range(130)]
    with LaunchLog() as log:
        if together:
            with one_launch({}):
                outs = [sums_of(each)([each])[0] for each in parts]
        else:
            outs = sums_of(*parts)(parts)
    assert launches(log) == 2
    for given, out in zip(parts, outs):
        torch.testing.assert_close(out, given.sum(0))


# --------------------------------------------------------------------------------------------------- sums that wait


def test_sums_that_wait_are_those_that_do_not():
    """What is absent, of several dtypes, and no sum at all: a launch a dtype, decided once."""
    parts = [torch.randn(40, 70), None, torch.randn(3, 5)]
    some = Sums([0, 2], [(40, 70), (3, 5)], [torch.float32, torch.bfloat16], INTERPRETER)
    calls = [(some, parts), (Sums([], [], [], INTERPRETER), [None, None]), (some, parts[::-1][2:] + parts[1:])]
    expected = [sums(given) for sums, given in calls]
    known = {}
    for _ in range(2):
        with LaunchLog() as log:
            with one_launch(known):
                outs = [sums(given) for sums, given in calls]
                assert log.total == 0
            assert launches(log) == 2
        for found, wanted in zip(outs, expected, strict=True):
            assert [x is None for x in found] == [x is None for x in wanted]
            assert all(x is y or torch.equal(x, y) for x, y in zip(found, wanted))
        assert len(known) == 1


def test_where_a_block_raises_nothing_is_launched_and_the_next_sum_does_not_wait():
    parts = torch.ones(3, 5)

    def fail():
        with one_launch({}):
            sums_of(parts)([parts])
            raise KeyError

    with LaunchLog() as log:
        with pytest.raises(KeyError):
            fail()
        assert launches(log) == 0
        assert torch.equal(sums_of(parts)([parts])[0], torch.full((5,), 3.0))
    with LaunchLog() as log, one_launch({}):
        pass
    assert log.total == 0


def test_blocks_inside_one_another_and_other_threads_wait_for_their_own():
    parts = torch.ones(3, 5)
    sums, found = sums_of(parts), []
    with LaunchLog() as log:
        with one_launch({}):
            sums([parts])
            with one_launch({}):
                sums([parts])
            assert launches(log) == 1
            thread = threading.Thread(target=lambda: found.extend(sums([parts])))
            thread.start()
            thread.join()
            assert torch.equal(found[0], torch.full((5,), 3.0))
            sums([parts])
            assert launches(log) == 2
        assert launches(log) == 3


@pytest.mark.parametrize(("route", "dtype"), [("short", torch.bfloat16), ("flash", torch.float32)])
def test_a_layers_gradients_are_the_same_bits_in_one_launch(route, dtype):
    def new(*shape):
        return torch.randn(shape).to(dtype)

    x, seed, vector = new(2, 7, 16), torch.tensor([3]), [new(16) for _ in range(4)]
    network = new(32, 16), new(32), new(16, 32), vector[3]
    fields = {
        RESIDUAL_NORM: (x, vector[0], x, *vector[1:3], seed, 1e-5, 0.5, 1, False, "triton"),
        FEED_FORWARD: (x, *network, 0.5, seed, 2, "relu", "triton"),
        ATTENTION: (
            new(2, 7, 3, 2, 8), None, None, *[None] * 7, seed, 0, 0, False, 0, -1, 0.0, 0, 0.5, 0.3, 1,
            False, False, route,
        ),
    }  # fmt: skip
    steps = []
    for operator, given in fields.items():
        inner = Inner(operator)
        outputs, saved = inner(*given)
        leading = {RESIDUAL_NORM: (None, None), ATTENTION: (False, dtype, None)}.get(operator, ())
        steps.append((inner, (torch.randn_like(outputs[0]), *leading, saved)))
    expected = [inner.backward(*given) for inner, given in steps]
    known = {}
    for _ in range(2):
        with LaunchLog() as log, one_launch(known):
            found = [inner.backward(*given) for inner, given in steps]
            assert launches(log) == 0
        assert launches(log) == 1
        for outputs, wanted in zip(found, expected):
            assert all(x is y or torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))
