"""Sums of parts: any number of parts, many sums in one launch, each rounded once to its own dtype."""

import pytest
import torch

from fasttfm.kernels.partial_sums import add_parts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")


@pytest.mark.parametrize("programs", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("columns", [1, 32, 75])
def test_every_part_counts_once_whatever_their_number(programs, columns):
    parts, out = torch.randn(programs, columns), torch.full((columns,), 9.0)
    add_parts([(parts, out)])
    torch.testing.assert_close(out, parts.double().sum(0).float(), atol=1e-5, rtol=1e-5)


def test_sums_of_different_sizes_and_dtypes_do_not_mix():
    sizes = [(3, 40, torch.float32), (70, 7, torch.bfloat16), (1, 100, torch.float32), (33, 64, torch.bfloat16)]
    sums = [(torch.randn(p, n), torch.empty(n, dtype=dtype)) for p, n, dtype in sizes]
    add_parts(sums)
    for parts, out in sums:
        exact = parts.double().sum(0)
        # the interpreter truncates to bfloat16 where a GPU rounds: one unit in the last place
        torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=2**-7 if out.dtype == torch.bfloat16 else 1e-5)


def test_more_sums_than_a_launch_takes():
    sums = [(torch.randn(2, 3), torch.empty(3)) for _ in range(130)]
    add_parts(sums)
    for parts, out in sums:
        torch.testing.assert_close(out, parts.sum(0))
