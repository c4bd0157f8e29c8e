"""Replaces the autograd functions of liger_kernel, which all its modules and functions call, by fasttfm's."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import functional as F
from fasttfm.compat import losses


def install(folder: Path) -> None:
    """Replace the functions of liger_kernel.ops, from the checkout in folder, before they are imported elsewhere."""
    sys.path.insert(0, str(folder / "src"))
    from liger_kernel import ops

    for name, function in APPLIED.items():
        assert hasattr(ops, name), name
        setattr(ops, name, type(name, (), {"apply": staticmethod(function)}))


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: Any = None,
) -> Tensor:
    """rms_norm(); casting_mode is ignored: fasttfm rounds to half precision once, at the end."""
    return F.rms_norm(x, _shifted(weight, offset), eps)


def _shifted(weight: Tensor | None, offset: float) -> Tensor | None:
    return weight if weight is None or not offset else weight + offset


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *others: Any
) -> tuple[Tensor, Tensor]:
    """residual_rms_norm(), which returns the norm and the sum."""
    return F.residual_rms_norm(x, residual, _shifted(weight, offset), eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
    """rotary() of queries and keys (B, H, L, D) by tables (1 or B, L, D) whose halves repeat, or (L, D)."""
    half = cos.shape[-1] // 2
    length = cos.shape[-2]
    tables = cos[..., :half].reshape(-1, half), sin[..., :half].reshape(-1, half)
    copies = tables[0].shape[0] // length
    positions = torch.arange(copies * length).view(copies, length).expand(q.shape[0], length)
    return tuple(F.rotary(x, *tables, positions) for x in (q, k))


_OFF: dict[str, Any] = {
    "lse_square_scale": 0.0,
    "softcap": None,
    "return_z_loss": False,
    "use_token_scaling": False,
    "return_token_accuracy": False,
    "return_predicted_tokens": False,
}
"""Arguments of the losses without a counterpart in fasttfm -> default."""
_LOSS = "ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss"
_AFTER_LOGITS = f"weight {_LOSS} return_token_accuracy return_predicted_tokens".split()
_AFTER_TARGET = (
    f"bias ce_weight {_LOSS} accum_dtype use_token_scaling return_token_accuracy return_predicted_tokens".split()
)
_NAMES = {"bias": "linear_bias", "ce_weight": "weight"}


def _options(names: list[str], given: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """Convert to the arguments of fasttfm.compat.losses; skips tests of unsupported features."""
    named = dict(zip(names, given)) | more
    for name, off in _OFF.items():
        if named.get(name, off) is not off and named[name] != off:
            pytest.skip(f"no counterpart in fasttfm: {name}")
    return {_NAMES.get(name, name): x for name, x in named.items() if name not in _OFF and name != "accum_dtype"}


def cross_entropy(logits: Tensor, target: Tensor, *given: Any, **more: Any) -> tuple[Tensor, None, None, None]:
    """cross_entropy() with torch's arguments."""
    return losses.cross_entropy(logits, target, **_options(_AFTER_LOGITS, given, more)), None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *given: Any, **more: Any
) -> tuple[Tensor, None, None, None]:
    """linear_cross_entropy() with torch's arguments."""
    options = _options(_AFTER_TARGET, given, more)
    return losses.linear_cross_entropy(hidden, weight, target, **options), None, None, None


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
