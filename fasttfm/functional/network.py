"""What the operators of the feed-forward network share, whichever activation is between its products.

Their calls have x, weight1, bias1, weight2, bias2 and route; what they save has x, weight1, weight2, has_bias1,
has_bias2 and in_parts: how many parts of bias1's gradient, (in_parts, F) float32, are wanted instead of their sum,
or 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.backends import kernel_route
from fasttfm.functional.operator import Gradients, lower_precision

Derivatives = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""dx, dweight1, dbias1, dweight2, dbias2; a bias gradient that is not wanted is empty."""


def one_dtype(x: Tensor, *others: Tensor | None) -> None:
    """Raises ValueError unless all have x's dtype."""
    if any(t is not None and t.dtype != x.dtype for t in others):
        raise ValueError(
            "feed_forward takes tensors of one dtype: got x "
            + ", ".join([str(x.dtype), *(str(t.dtype) for t in others if t is not None)])
            + " (x, weights, biases); cast them, or run under torch.autocast"
        )


def decide(call: Any) -> str:
    """torch; table: a kernel's choice between its ways; fused: its own products, where Triton was asked for by name."""
    if call.route in ("fused", "table"):
        return call.route
    if kernel_route(call.route, call.x) == "torch":
        return "torch"
    return "fused" if call.route == "triton" else "table"


def kernel_choice(route: str) -> str | None:
    """The route that a launch function is told; None: what its table says."""
    return "fused" if route == "fused" else None


def in_parts(bias1_parts: Tensor | None) -> int:
    """How many parts of bias1's gradient bias1_parts (P, F) takes."""
    return 0 if bias1_parts is None else bias1_parts.shape[0]


def by_name(saved: Any, derivatives: Derivatives) -> Gradients:
    """The gradients of a call's tensors."""
    dx, dweight1, dbias1, dweight2, dbias2 = derivatives
    return {
        "x": dx,
        "weight1": dweight1,
        "bias1": dbias1 if saved.has_bias1 and not saved.in_parts else None,
        "bias1_parts": dbias1 if saved.in_parts else None,
        "weight2": dweight2,
        "bias2": dbias2 if saved.has_bias2 else None,
    }


def bias1_gradient(saved: Any, dbefore: Tensor) -> Tensor:
    """The sum of dbefore (M, F) over rows, as it is wanted."""
    dbias1 = dbefore.sum(0) if saved.has_bias1 else dbefore.new_empty(0)
    if saved.in_parts:
        dbias1 = torch.nn.functional.pad(dbias1[None].float(), (0, 0, 0, saved.in_parts - 1))
    return dbias1


def fake_derivatives(call: Any) -> Derivatives:
    """Empty ones of the right shapes and dtypes, for a backward call that holds what was saved."""
    saved = call.saved
    weight1, weight2 = saved.weight1, saved.weight2
    hidden, out = weight1.shape[0], weight2.shape[0]
    if saved.in_parts:
        dbias1 = weight1.new_empty(saved.in_parts, hidden, dtype=torch.float32)
    else:
        dbias1 = weight1.new_empty(hidden if saved.has_bias1 else 0)
    return (
        saved.x.new_empty(saved.x.shape),
        weight1.new_empty(weight1.shape),
        dbias1,
        weight2.new_empty(weight2.shape),
        weight2.new_empty(out if saved.has_bias2 else 0),
    )


def autocast(call: Any, dtype: torch.dtype) -> Any:
    """The call with every tensor in dtype."""
    return call._replace(
        x=lower_precision(call.x, dtype),
        weight1=lower_precision(call.weight1, dtype),
        bias1=lower_precision(call.bias1, dtype),
        weight2=lower_precision(call.weight2, dtype),
        bias2=lower_precision(call.bias2, dtype),
    )
