"""Pairs of equal torch.nn and fasttfm.nn modules, and their comparison."""

from typing import Any

import torch
from torch import Tensor

import fasttfm.nn


def twins(name: str, *args: Any, dtype: torch.dtype = torch.float64, **kwargs: Any) -> tuple[Any, Any]:
    """torch.nn.<name> and fasttfm.nn.<name> with the same random weights, biases and norms included."""
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(*args, **kwargs).to(dtype)
    ours = getattr(fasttfm.nn, name)(*args, **kwargs).to(dtype)
    share(theirs, ours)
    return theirs, ours


def share(theirs: torch.nn.Module, ours: torch.nn.Module) -> None:
    """Randomize the weights of theirs and load them into ours."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    ours.load_state_dict(theirs.state_dict(), strict=True)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def compare(
    theirs: torch.nn.Module, ours: torch.nn.Module, *inputs: Tensor, keep: Tensor | None = None,
    tolerance: float = 1e-9, **options: Any,
) -> None:  # fmt: skip
    """Assert equal outputs (attention weights too), input gradients and parameter gradients.

    A tensor passed twice stays one tensor. keep: mask of the outputs to compare, without padding.
    """
    results = []
    for module in (theirs, ours):
        module.zero_grad()
        leaf_tensors = {id(x): x.detach().clone().requires_grad_() for x in inputs}
        outputs = module(*(leaf_tensors[id(x)] for x in inputs), **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        chosen = [x if keep is None else x[keep] for x in outputs if x is not None]
        torch.manual_seed(1)
        loss = sum((x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in chosen)
        loss.backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        results.append((chosen, [x.grad for x in leaf_tensors.values()], gradients))
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


def causal(length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


def hides_some(*shape: int) -> Tensor:
    """A random bool mask, True is masked, except the first key of every row."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


def padding(*lengths: int) -> Tensor:
    """Padding mask (N, S) bool, True past each length; S is the longest."""
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


def as_floats(mask: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Convert a bool mask to floats to add."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask, -torch.inf)
