"""The passes between the products of a training step on a CPU, each over a row at a time, compiled by numba.

PyTorch takes several calls for each of them and writes float32 tensors between: at 256 tokens the softmax of attention,
forward and backward, is eight passes over four times the memory of the weights. Here one pass reads and writes half
precision. What a causal mask or a length hides is not computed. Same roundings as PyTorch's route, and the same dropout
masks. Optional, as step_passes.py, whose pieces these are; one thread, so where PyTorch has more than _THREADS, or two
for a norm that drops nothing, it is the faster.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional.linear import frozen
from fasttfm.functional.step_passes import array, usable

if TYPE_CHECKING:
    from fasttfm.functional.attention.arguments import Options
    from fasttfm.functional.dropout import Dropout

_DTYPES = (torch.float32, torch.bfloat16)
_THREADS = 2
_LEAST = 1 << 15
"""Elements below which it is hardly worth a call, and never worth compiling."""


def takes(*tensors: Tensor) -> bool:
    """Whether the passes take these tensors, and are the faster way; never in a search, whose bits must not depend on
    how many rows there are."""
    return (
        tensors[0].numel() >= _LEAST
        and all(type(x) is Tensor and x.device.type == "cpu" and x.dtype in _DTYPES for x in tensors)
        and torch.get_num_threads() <= _THREADS
        and not frozen(tensors[0])
        and usable()
    )


def draws(shape: tuple[int, int, int], seed: Tensor) -> bool:
    """Whether keep_mask() is the faster way to the mask."""
    return math.prod(shape) >= _LEAST and type(seed) is Tensor and seed.device.type == "cpu" and usable()


def keep_mask(shape: tuple[int, int, int], p: float, seed: Tensor, site: int) -> Tensor:
    """reference.keep_mask()."""
    keep = torch.empty(shape, dtype=torch.uint8)
    loops().keep_mask(_unsigned(seed), np.uint64(site), reference.dropout_threshold(p), keep.numpy())
    return keep.view(torch.bool)


def softmax(scores: Tensor, scale: float, options: Options, out: Tensor) -> Tensor:
    """out becomes softmax(scores * scale) over the keys that a query sees, zero for the others; both (B, H, L, S)
    contiguous, and may be one. options: without mask."""
    planes = [array(x.flatten(0, 1)) for x in (scores, out)]
    loops().softmax(planes[0], *_seen(scores, options), np.float32(scale), planes[1])
    return out


def softmax_gradient(grad: Tensor, p: Tensor, kept: Tensor | None, options: Options) -> Tensor:
    """In grad's memory the gradient of the scores before they were scaled; grad, p, kept as
    torch_route.softmax_gradient() takes them, contiguous."""
    planes = [array(x.flatten(0, 1)) for x in (grad, p, p if kept is None else kept)]
    loops().softmax_gradient(*planes, *_seen(p, options), np.float32(options.scale))
    return grad


def _seen(scores: Tensor, options: Options) -> tuple:
    """What the loops are told of the keys that a query sees."""
    batch, heads, _, keys = scores.shape
    lengths = options.key_lengths
    lengths = torch.full((batch,), keys) if lengths is None else lengths.to(torch.int64).contiguous()
    return lengths.numpy(), heads, options.causal, options.causal_offset


def gelu_tanh(before: Tensor, keep: Tensor) -> Tensor:
    """GELU by tanh of before (M, F) contiguous, zero where keep, (M, F) bool or empty, is False; not scaled. That by
    the error function is as fast in PyTorch."""
    hidden = torch.empty_like(before)
    loops().gelu_tanh(*_kept(before, keep), array(hidden))
    return hidden


def gelu_tanh_gradient(grad: Tensor, before: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradient of gelu_tanh()'s result that of before, in grad's memory, and gelu_tanh() once more; all (M, F)
    contiguous."""
    hidden = torch.empty_like(before)
    loops().gelu_tanh_gradient(array(grad), *_kept(before, keep), array(hidden))
    return grad, hidden


def _kept(before: Tensor, keep: Tensor) -> tuple:
    """before and keep as the loops take them, and whether keep is to be looked at."""
    return array(before), keep.view(torch.uint8).reshape(-1, before.shape[1]).numpy(), keep.numel() > 0


def takes_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, drops: bool) -> bool:
    """Whether residual_layer_norm() takes these, or its gradient, which drops nothing by itself."""
    return (
        (drops or torch.get_num_threads() == 1)
        and weight is not None
        and bias is not None
        and all(p.dim() == 1 and p.dtype == torch.float32 and p.is_contiguous() for p in (weight, bias))
        and residual.dtype in (torch.float32, x.dtype)
        and takes(x, residual)
    )


def residual_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y in x's dtype, s in residual's, mean and rstd (M,) float32, and what dropout kept (M, N) bool or empty; x and
    residual (M, N) contiguous, weight and bias (N,) float32."""
    y, s = torch.empty_like(x), torch.empty_like(residual)
    mean, rstd = torch.empty(len(x)), torch.empty(len(x))
    threshold = reference.dropout_threshold(dropout.dropout_p) if dropout.seed is not None else 0
    keep = torch.empty(x.shape if threshold else (0,), dtype=torch.uint8)
    loops().residual_layer_norm(
        array(x), array(residual), array(weight), array(bias), np.float32(eps),
        np.uint64(0) if dropout.seed is None else _unsigned(dropout.seed), np.uint64(dropout.site), threshold,
        np.float32(dropout.scale), keep.numpy(), array(y), array(s), array(mean), array(rstd),
    )  # fmt: skip
    return y, s, mean, rstd, keep.view(torch.bool)


def residual_layer_norm_gradient(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    statistics: tuple[Tensor, Tensor],
    weight: Tensor,
    keep: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x in dy's dtype, of residual in s's, of weight and of bias; all rows (M, N) contiguous. statistics:
    mean and rstd; keep: as residual_layer_norm() gave it, with the scale of what it kept."""
    dx, dresidual = torch.empty_like(dy), torch.empty_like(s)
    dweight, dbias = torch.zeros(dy.shape[1]), torch.zeros(dy.shape[1])
    added = s if ds is None else ds
    loops().residual_layer_norm_gradient(
        array(dy), array(added), array(s), *map(array, statistics), array(weight), keep.view(torch.uint8).numpy(),
        np.float32(scale), ds is not None, keep.numel() > 0, array(dx), array(dresidual), array(dweight), array(dbias),
    )  # fmt: skip
    return dx, dresidual, dweight, dbias


def _unsigned(seed: Tensor) -> np.uint64:
    return np.uint64(int(seed.item()) & 0xFFFFFFFFFFFFFFFF)


@functools.cache
def loops() -> Any:
    """The module of the compiled functions, which imports numba."""
    from fasttfm.functional import training_loops

    return training_loops
