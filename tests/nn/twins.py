"""The same module of torch.nn and of fasttfm.nn, side by side."""

from typing import Any

import torch
from torch import Tensor

import fasttfm.nn


def twins(name: str, *args: Any, dtype: torch.dtype = torch.float64, **kwargs: Any) -> tuple[Any, Any]:
    """torch.nn.<name> and fasttfm.nn.<name> with the same weights, none at a neutral value such as zero bias."""
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(*args, **kwargs).to(dtype)
    ours = getattr(fasttfm.nn, name)(*args, **kwargs).to(dtype)
    share(theirs, ours)
    return theirs, ours


def share(theirs: torch.nn.Module, ours: torch.nn.Module) -> None:
    """Draws weights for theirs and loads them into ours through the state dict."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    ours.load_state_dict(theirs.state_dict(), strict=True)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def compare(
    theirs: torch.nn.Module,
    ours: torch.nn.Module,
    *inputs: Tensor,
    keep: Tensor | None = None,
    tolerance: float = 1e-9,
    **options: Any,
) -> None:
    """Asserts equal outputs (weights too, where they are returned), input gradients and parameter gradients.

    The same tensor given twice stays one tensor. keep marks what of the output counts (padding does not).
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
        gradients = {name: p.grad for name, p in module.named_parameters()}
        results.append((chosen, [x.grad for x in leaf_tensors.values()], gradients))
    (outputs, input_gradients, gradients), (our_outputs, our_input_gradients, our_gradients) = results
    assert len(outputs) == len(our_outputs)
    for expected, got in zip([*outputs, *input_gradients], [*our_outputs, *our_input_gradients]):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert gradients.keys() == our_gradients.keys()
    for name, expected in gradients.items():
        got = our_gradients[name]
        assert (got is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def causal(length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


def hides_some(*shape: int) -> Tensor:
    """A bool mask, True hides, that leaves every row at least its first key."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


def padding(*lengths: int) -> Tensor:
    """(N, S) bool, True past each length; S is the longest."""
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


def as_floats(mask: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The additive form of a bool mask."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask, -torch.inf)
