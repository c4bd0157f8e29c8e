"""From hidden states to logits, and to their loss."""

from typing import Any

from torch import Tensor

from fasttfm import functional as F
from fasttfm.cpu.linear import linear
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.plain import LINEAR, untouched


def logits(hidden: Tensor, output: Any) -> Tensor:
    """output(hidden), hidden (..., d) to (..., V)."""
    if untouched(output, LINEAR) and ordinary(hidden, output.weight, output.bias):
        return linear(hidden, output.weight, output.bias)
    return output(hidden)


def token_loss(
    hidden: Tensor, output: Any, targets: Tensor, *, label_smoothing: float = 0.0, pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy of output(hidden), summed over targets other than pad_id; hidden (B, L, d), targets (B, L).

    Returns (label-smoothed loss, loss without smoothing and without gradient, number of targets), each 0-d. The logits
    (B, L, V) never exist all at once where the operator can avoid it.
    """
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": pad_id}
    if untouched(output, LINEAR) and output.bias is None and ordinary(rows, output.weight):
        loss, nll = F.linear_cross_entropy(rows, output.weight, wanted, **options)
    else:
        loss, nll = F.cross_entropy(output(rows), wanted, reduction="sum", **options)
    return loss, nll, (targets != pad_id).sum()
