"""Partial sums: any number of parts, many sums in one launch, each rounded once to its dtype."""

import threading

import pytest
import torch

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
