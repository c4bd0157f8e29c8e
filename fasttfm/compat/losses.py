"""Drop-ins for torch.nn.functional's cross_entropy and linear_cross_entropy (torch 2.13 and newer)."""

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.errors import ArgumentError
from fasttfm.functional.linear_cross_entropy import kept_logits
from fasttfm.functional.operator import casts
from fasttfm.functional.signature import names_arguments


@names_arguments(logits="input", class_weights="weight")
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch.nn.functional.cross_entropy on fasttfm's kernels.

    input (V), (N, V) or (N, V, d1, ...), weight (V,), target (), (N,) or (N, d1, ...) int64 or int32. Returns the loss
    in input's dtype (float32 under autocast): 0-d, or like target with reduction none. Targets that are probabilities,
    and the deprecated size_average and reduce, fall back to PyTorch. Raises ArgumentError for shapes that do not agree.
    """
    if size_average is not None or reduce is not None:
        return nn.functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    return _cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "reduction": reduction}
    if target.is_floating_point() and target.shape == input.shape:
        return nn.functional.cross_entropy(input, target, weight, **options)
    expected = input.shape[:1] + input.shape[2:] if input.dim() > 1 else torch.Size()
    if input.dim() < 1 or target.shape != expected:
        raise ArgumentError(
            f"input is {tuple(input.shape)}, target {tuple(target.shape)}: they must be (V) and (), or (N, V, ...) and "
            "(N, ...)"
        )
    rows = input.movedim(1, -1).flatten(0, -2) if input.dim() > 1 else input[None]
    loss, _ = F.cross_entropy(rows, target.reshape(-1), class_weights=weight, **options)
    return _in_dtype(loss.view(target.shape) if reduction == "none" else loss, input)


def _in_dtype(loss: Tensor, x: Tensor) -> Tensor:
    """loss in x's dtype; in float32 under autocast, as in torch."""
    return loss if casts(x) else loss.to(x.dtype)


@names_arguments(hidden="input", logits="input", weight="linear_weight", class_weights="weight", bias="linear_bias")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """torch.nn.functional.linear_cross_entropy on fasttfm's kernels.

    input (E) or (N, E), linear_weight (V, E), linear_bias (V,), weight (V,) of the classes, target () or (N,) int64 or
    int32. options (LinearCrossEntropyOptions): any value processes the rows in chunks. The logits are kept with a bias,
    with reduction none, with weight and label_smoothing, and for probabilities or a linear_weight (V, d1, ..., E),
    which PyTorch computes. Returns the loss in input's dtype, 0-d, or like target with reduction none. Raises
    ArgumentError for shapes that do not agree.
    """
    if input.dim() not in (1, 2) or linear_weight.dim() < 2 or input.shape[-1] != linear_weight.shape[-1]:
        raise ArgumentError(
            f"input is {tuple(input.shape)}, linear_weight {tuple(linear_weight.shape)}: they must be (E) or (N, E), "
            "and (V, E) or (V, d1, ..., E)"
        )
    if linear_weight.dim() > 2 > input.dim():
        raise ArgumentError(f"input is {tuple(input.shape)}: a linear_weight (V, d1, ..., E) needs a batch (N, E)")
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        raise ArgumentError(
            f"linear_bias is {tuple(linear_bias.shape)}: it must be {tuple(linear_weight.shape[:-1])}, a number for "
            "each row of linear_weight"
        )
    probabilities = target.is_floating_point() and target.shape != input.shape[:-1]
    if probabilities and ignore_index is not None:
        raise ArgumentError(f"ignore_index is {ignore_index}: leave it out if the target is probabilities")
    shared: dict[str, Any] = {
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "ignore_index": -100 if ignore_index is None else ignore_index,
    }
    if linear_bias is not None or linear_weight.dim() > 2 or probabilities:
        flat = None if linear_bias is None else linear_bias.flatten()
        logits = kept_logits(torch.atleast_2d(input), linear_weight.flatten(0, -2), flat)
        return _cross_entropy(logits.view(*input.shape[:-1], *linear_weight.shape[:-1]), target, weight, **shared)
    loss, _ = F.linear_cross_entropy(
        input, linear_weight, target, class_weights=weight, low_memory=options is not None, **shared
    )
    return _in_dtype(loss, input)
