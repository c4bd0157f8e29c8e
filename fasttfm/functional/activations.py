"""Activations of feed-forward networks, by name."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), GPT-2's GELU approximation; any shape and dtype."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
}
"""Activations that functional.feed_forward() fuses into its products. gelu is the exact x * Phi(x) (Hendrycks and
Gimpel 2016), as in BERT; silu is Marian's swish."""
