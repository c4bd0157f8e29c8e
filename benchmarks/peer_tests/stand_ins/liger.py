"""fasttfm in liger_kernel's place: its autograd functions, which its modules and functions all call, are ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import functional as F


def install(folder: Path) -> None:
    """Exchanges the functions of liger_kernel.ops, from the checkout in folder, before anything takes them from it."""
    sys.path.insert(0, str(folder / "src"))
    from liger_kernel import ops

    for name, function in APPLIED.items():
        assert hasattr(ops, name), name
        setattr(ops, name, type(name, (), {"apply": staticmethod(function)}))


def _absent(**given: tuple[Any, Any]) -> None:
    for name, (value, off) in given.items():
        if value is not off and value != off:
            pytest.skip(f"no counterpart in fasttfm: {name}")


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: Any = None,
) -> Tensor:
    """rms_norm(); casting_mode tells where half precision is rounded, which fasttfm does once, at the end."""
    return F.rms_norm(x, _shifted(weight, offset), eps)


def _shifted(weight: Tensor | None, offset: float) -> Tensor | None:
    return weight if weight is None or not offset else weight + offset


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *others: Any
) -> tuple[Tensor, Tensor]:
    """residual_rms_norm(), which gives the norm and the sum."""
    return F.residual_rms_norm(x, residual, _shifted(weight, offset), eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
    """rotary() of queries and keys (B, H, L, D) by tables (1 or B, L, D) whose halves repeat, or (L, D)."""
    half = cos.shape[-1] // 2
    length = cos.shape[-2]
    tables = cos[..., :half].reshape(-1, half), sin[..., :half].reshape(-1, half)
    copies = tables[0].shape[0] // length
    positions = torch.arange(copies * length).view(copies, length).expand(q.shape[0], length)
    return tuple(F.rotary(x, *tables, positions) for x in (q, k))


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> tuple[Tensor, None, None, None]:
    """cross_entropy()."""
    _absent(
        weight=(weight, None),
        lse_square_scale=(lse_square_scale, 0.0),
        softcap=(softcap, None),
        return_z_loss=(return_z_loss, False),
        return_token_accuracy=(return_token_accuracy, False),
        return_predicted_tokens=(return_predicted_tokens, False),
    )
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    return F.cross_entropy(logits, target, **options)[0], None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> tuple[Tensor, None, None, None]:
    """linear_cross_entropy(), divided by the rows that count for a mean."""
    _absent(
        bias=(bias, None),
        ce_weight=(ce_weight, None),
        lse_square_scale=(lse_square_scale, 0.0),
        softcap=(softcap, None),
        return_z_loss=(return_z_loss, False),
        use_token_scaling=(use_token_scaling, False),
        return_token_accuracy=(return_token_accuracy, False),
        return_predicted_tokens=(return_predicted_tokens, False),
        reduction=(reduction if reduction == "none" else "", ""),
    )
    loss, _ = F.linear_cross_entropy(hidden, weight, target, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    return loss, None, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """layer_norm()."""
    return F.layer_norm(x, weight, bias, eps)


def embedding(weight: Tensor, indices: Tensor) -> Tensor:
    """embed()."""
    flat = indices.reshape(1, -1)
    return F.embed(flat, weight).view(*indices.shape, weight.shape[1])


APPLIED: dict[str, Callable[..., Any]] = {
    "LigerRMSNormFunction": rms_norm,
    "LigerFusedAddRMSNormFunction": add_rms_norm,
    "LigerLayerNormFunction": layer_norm,
    "LigerRopeFunction": rope,
    "LigerCrossEntropyFunction": cross_entropy,
    "LigerFusedLinearCrossEntropyFunction": linear_cross_entropy,
    "LigerEmbeddingFunction": embedding,
}
