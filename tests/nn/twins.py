"""Pairs of equal torch.nn and fasttfm.nn modules, their comparison, and masks for both."""

from typing import Any

import torch
from torch import Tensor

import fasttfm.nn

N, H, L, S, E, F = 3, 2, 4, 5, 8, 12
"""Batch, heads, target length, source length, width, hidden width."""
LAYOUTS = ("batch first", "sequence first", "unbatched")


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


def tensor(layout: str, length: int, width: int = E) -> Tensor:
    return rand(
        *{"batch first": (N, length, width), "sequence first": (length, N, width), "unbatched": (length, width)}[layout]
    )


def compare(
    theirs: torch.nn.Module, ours: torch.nn.Module, *inputs: Tensor, keep: Tensor | None = None,
    tolerance: float = 1e-9, inference: bool = True, **options: Any,
) -> None:  # fmt: skip
    """Assert equal outputs (attention weights too), input gradients and parameter gradients.

    A tensor passed twice stays one tensor. keep: mask of the outputs to compare, without padding. inference: compare
    outputs in eval mode without gradients too, by the fast path of torch.nn, which takes float masks as bool: not then.
    """
    inference &= not any(isinstance(each, Tensor) and each.is_floating_point() for each in options.values())
    results: list[tuple[Any, ...]] = []
    for module in (theirs, ours):
        module.zero_grad()
        leaf_tensors = {id(x): x.detach().clone().requires_grad_() for x in inputs}
        chosen = _outputs(module(*(leaf_tensors[id(x)] for x in inputs), **options), keep)
        torch.manual_seed(1)
        loss = sum((x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in chosen)
        loss.backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        results.append((chosen, [x.grad for x in leaf_tensors.values()], gradients))
        if inference:
            with torch.no_grad():
                results[-1] += (_outputs(module.eval()(*inputs, **options), keep),)
            module.train()
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


def _outputs(outputs: Any, keep: Tensor | None) -> list[Tensor]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [x if keep is None else x[keep] for x in outputs if x is not None]


def masks(layout: str, name: str, queries: int, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """attn_mask and key_padding_mask by name, such as "bool 3-D + padding"; no mask is called "none"."""
    batch = 1 if layout == "unbatched" else N
    attn, padding = (
        {
            "bool": hides_some(queries, keys),
            "float": rand(queries, keys),
            "-inf": as_floats(hides_some(queries, keys)),
            "bool 3-D": hides_some(batch * H, queries, keys),
            "float 3-D": rand(batch * H, queries, keys),
            "causal": torch.ones(queries, keys, dtype=torch.bool).triu(1),
        },
        hides_some(batch, keys),
    )
    paddings = {"padding": padding, "float padding": as_floats(padding) + rand(batch, keys)}
    wanted = name.split(" + ")
    mask, hidden = (next((x for each, x in side.items() if each in wanted), None) for side in (attn, paddings))
    return mask, hidden[0] if hidden is not None and layout == "unbatched" else hidden


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
