"""An operator on a route against what it must equal, forward and backward."""

import torch

from fasttfm import functional as F


def agree(ours, expected, inputs, backend="auto", gradients=None, **close):
    """Asserts that ours(*inputs) gives expected, a tensor, and its gradients; returns both. gradients: a tolerance of
    their own."""
    probe = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, probe)
    with F.backend(backend):
        actual = ours(*inputs)
        found = torch.autograd.grad(actual, inputs, probe)
    torch.testing.assert_close(actual, expected, **close)
    torch.testing.assert_close(found, wanted, **(gradients or close))
    return actual, found
