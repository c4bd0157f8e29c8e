"""Comparison of an operator with what it must equal, forward and backward."""

import torch

from fasttfm import functional as F


def agree(ours, expected, inputs, backend="auto", gradients=None, **close):
    """Assert that ours(*inputs) equals expected, a tensor, with its gradients; return both.

    gradients: tolerances of the gradients, if others.
    """
    probe = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, probe)
    with F.backend(backend):
        actual = ours(*inputs)
        computed = torch.autograd.grad(actual, inputs, probe)
    torch.testing.assert_close(actual, expected, **close)
    torch.testing.assert_close(computed, wanted, **(gradients or close))
    return actual, computed


def solve(function, inputs, **options):
    """The outputs of a function, and the gradients of its inputs that are not None."""
    outputs = function(*inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((o.double() * torch.cos(torch.arange(o.numel()) + 1.0 * i).view(o.shape)).sum()
                for i, o in enumerate(outputs))  # fmt: skip
    return [*outputs, *torch.autograd.grad(total, [x for x in inputs if x is not None])]


def assert_same(actual, expected, tolerance):
    """Assert equal dtypes, and values within the tolerance of the coarsest dtype, relative to the largest value."""
    close = max(tolerance[x.dtype] for x in expected)
    for mine, other in zip(actual, expected, strict=True):
        assert mine.dtype == other.dtype
        largest = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(mine, other, rtol=0, atol=close * max(1.0, largest))
