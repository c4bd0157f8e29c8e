"""Partial sums: any number of parts, many sums in one launch, each rounded once to its dtype."""

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
    """The Sums of these parts."""
    dtypes = [torch.float32] * len(parts) if dtypes is None else dtypes
    return Sums(range(len(parts)), [each.shape for each in parts], dtypes, INTERPRETER)


def launches(log):
    return log.triton["partial_sums._add_parts"]


@pytest.mark.parametrize("programs", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("columns", [1, 32, 75])
def test_every_part_is_added_once(programs, columns):
    parts, out = torch.randn(programs, columns), torch.full((columns,), 9.0)
    sums_of(parts)([parts], [out])
    torch.testing.assert_close(out, parts.double().sum(0).float(), atol=1e-5, rtol=1e-5)


def test_sums_of_different_sizes_and_dtypes_do_not_mix():
    sizes = [(3, 40, torch.float32), (70, 7, torch.bfloat16), (1, 100, torch.float32), (33, 64, torch.bfloat16)]
    parts = [torch.randn(p, n) for p, n, _ in sizes]
    for part, out in zip(parts, sums_of(*parts, dtypes=[dtype for *_, dtype in sizes])(parts), strict=True):
        # the interpreter truncates to bfloat16 where a GPU rounds: one unit in the last place
        rtol = 2**-7 if out.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.double(), part.double().sum(0), atol=1e-5, rtol=rtol)


@pytest.mark.parametrize("deferred", [False, True])
def test_more_sums_than_a_launch_takes(deferred):
    parts = [torch.randn(2, 3) for _ in range(130)]
    with LaunchLog() as log:
        if deferred:
            with one_launch({}):
                outs = [sums_of(each)([each])[0] for each in parts]
        else:
            outs = sums_of(*parts)(parts)
    assert launches(log) == 2
    for part, out in zip(parts, outs, strict=True):
        torch.testing.assert_close(out, part.sum(0))


# ----------------------------------------------------------------------------------------------------- deferred sums


def test_deferred_sums_equal_immediate_ones():
    """With absent parts, several dtypes and an empty Sums: one launch per dtype, planned once."""
    parts = [torch.randn(40, 70), None, torch.randn(3, 5)]
    some = Sums([0, 2], [(40, 70), (3, 5)], [torch.float32, torch.bfloat16], INTERPRETER)
    calls = [(some, parts), (Sums([], [], [], INTERPRETER), [None, None]), (some, parts[::-1][2:] + parts[1:])]
    expected = [sums(some_parts) for sums, some_parts in calls]
    cache = {}
    for _ in range(2):
        with LaunchLog() as log:
            with one_launch(cache):
                results = [sums(some_parts) for sums, some_parts in calls]
                assert log.total == 0
            assert launches(log) == 2
        for outs, immediate in zip(results, expected, strict=True):
            assert all(x is y or torch.equal(x, y) for x, y in zip(outs, immediate, strict=True))
        assert len(cache) == 1


def test_a_block_that_raises_launches_nothing_and_defers_no_more():
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


def test_nested_blocks_and_other_threads_defer_only_their_own_sums():
    parts = torch.ones(3, 5)
    sums, results = sums_of(parts), []
    with LaunchLog() as log:
        with one_launch({}):
            sums([parts])
            with one_launch({}):
                sums([parts])
            assert launches(log) == 1
            thread = threading.Thread(target=lambda: results.extend(sums([parts])))
            thread.start()
            thread.join()
            assert torch.equal(results[0], torch.full((5,), 3.0))
            sums([parts])
            assert launches(log) == 2
        assert launches(log) == 3


@pytest.mark.parametrize(("route", "dtype"), [("short", torch.bfloat16), ("flash", torch.float32)])
def test_the_gradients_of_a_layer_are_bitwise_equal_in_one_launch(route, dtype):
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
    for operator, arguments in fields.items():
        inner = Inner(operator)
        outputs, saved = inner(*arguments)
        leading = {RESIDUAL_NORM: (None, None), ATTENTION: (False, dtype, None)}.get(operator, ())
        steps.append((inner, (torch.randn_like(outputs[0]), *leading, saved)))
    expected = [inner.backward(*arguments) for inner, arguments in steps]
    cache = {}
    for _ in range(2):
        with LaunchLog() as log, one_launch(cache):
            results = [inner.backward(*arguments) for inner, arguments in steps]
            assert launches(log) == 0
        assert launches(log) == 1
        for outputs, immediate in zip(results, expected, strict=True):
            assert all(x is y or torch.equal(x, y) for x, y in zip(outputs, immediate, strict=True))
