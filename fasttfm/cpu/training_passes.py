"""Fused operations between the matrix products of a training step on a CPU, compiled by numba.

PyTorch needs several calls for each and writes float32 intermediates: at 256 tokens the softmax of attention, forward
and backward, is eight passes over four times the memory of the weights. Here one pass reads and writes half precision,
and skips what a causal mask or a length hides. Roundings and dropout masks are those of the PyTorch backend. The loops
run on PyTorch's threads, with the same bits for any number of them (thread_team.py). numba is optional; PASS_ELEMENTS
is the least size.
"""

import math
from collections.abc import Container

import numpy as np
import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu.linear import frozen
from fasttfm.cpu.step_passes import array, loops, team, usable

PASS_ELEMENTS = 1 << 15
"""Least number of elements for a compiled loop: fewer hardly pay for the call, and never for the compilation. Measured
on two cores of an Intel Xeon with AMX, embedding and loss on two of an AMD EPYC with AVX2, and on no more threads.
LayerNorm without dropout was about as fast in PyTorch, on an EPYC under other load."""
THREADS_ALONE = 2
"""Most PyTorch threads at which loops are used if they can run on one alone, without an OpenMP library that starts
teams; measured on the Xeon."""
_DTYPES = (torch.float32, torch.bfloat16)
_LIKE = {
    torch.float32: np.float32(0.0), torch.bfloat16: np.uint16(0), torch.int64: np.int64(0), torch.int32: np.int32(0)
}  # fmt: skip
"""An element of each dtype as the loops read it, from which numba infers the type."""


def takes(*tensors: Tensor) -> bool:
    """Return whether a compiled loop supports these tensors and is faster; never in a search, whose bits must not
    depend on the row count."""
    return tensors[0].is_cpu and tensors[0].numel() >= PASS_ELEMENTS and computable(*tensors)


def computable(*tensors: Tensor, dtypes: Container[torch.dtype] = _DTYPES) -> bool:
    """Return whether the compiled loops support these tensors."""
    for x in tensors:
        if type(x) is not Tensor or not x.is_cpu or x.dtype not in dtypes:
            return False
    return not frozen(tensors[0]) and usable() and _has_team()


def drawn(shape: tuple[int, int, int], p: float, seed: Tensor, site: int) -> Tensor:
    """reference.keep_mask(), in a compiled loop if that is faster."""
    passes = type(seed) is Tensor and seed.is_cpu and math.prod(shape) >= PASS_ELEMENTS and usable()
    return (keep_mask if passes else reference.keep_mask)(shape, p, seed, site)


def keep_mask(shape: tuple[int, int, int], p: float, seed: Tensor, site: int) -> Tensor:
    """reference.keep_mask() in a compiled loop."""
    keep = seed.new_empty(shape, dtype=torch.uint8)
    loops("training_loops").keep_mask(
        team(), unsigned(seed), np.uint64(site), reference.dropout_threshold(p), keep.numpy()
    )
    return keep.view(torch.bool)


def gelu_tanh(before: Tensor, keep: Tensor) -> Tensor:
    """tanh GELU of before (M, F) contiguous, times keep (M, F) bool or empty, without dropout's scale. (The erf GELU is
    as fast in PyTorch.)"""
    hidden = torch.empty_like(before)
    loops("training_loops").gelu_tanh(team(), *_kept(before, keep), array(hidden))
    return hidden


def gelu_tanh_gradient(grad: Tensor, before: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of before, written to grad's memory, and the recomputed gelu_tanh(); all (M, F) contiguous."""
    hidden = torch.empty_like(before)
    loops("training_loops").gelu_tanh_gradient(team(), array(grad), *_kept(before, keep), array(hidden))
    return grad, hidden


def _kept(before: Tensor, keep: Tensor) -> tuple:
    """before and keep as arrays, and whether keep is not empty."""
    return array(before), keep.view(torch.uint8).reshape(-1, before.shape[1]).numpy(), keep.numel() > 0


def takes_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether residual_layer_norm() and its gradient support these and are faster."""
    if weight is None or bias is None or residual.dtype not in (torch.float32, x.dtype) or not takes(x, residual):
        return False
    return all(p.dim() == 1 and p.dtype == torch.float32 and p.is_contiguous() for p in (weight, bias))


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    site: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y in x's dtype, s in residual's, mean and rstd (M,) float32 and the keep-mask (M, N) bool, or empty without seed.

    x and residual (M, N) contiguous, weight and bias (N,) float32.
    """
    rows, width = x.shape
    y, s = torch.empty_like(x), torch.empty_like(residual)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    threshold = reference.dropout_threshold(dropout_p) if seed is not None else 0
    dropout_scale = reference.dropout_scale(dropout_p) if threshold else 1.0
    keep = x.new_empty((rows, width) if threshold else (0,), dtype=torch.bool)
    loops("norm_loops").residual_layer_norm(
        team(), rows, width, _LIKE[x.dtype], _LIKE[residual.dtype], x.data_ptr(), residual.data_ptr(),
        weight.data_ptr(), bias.data_ptr(), np.float32(eps), np.uint64(0) if seed is None else unsigned(seed),
        np.uint64(site), threshold, np.float32(dropout_scale), keep.data_ptr(), y.data_ptr(), s.data_ptr(),
        mean.data_ptr(), rstd.data_ptr(),
    )  # fmt: skip
    return y, s, mean, rstd, keep


def residual_layer_norm_gradient(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    statistics: tuple[Tensor, Tensor],
    weight: Tensor,
    keep: Tensor,
    scale: float,
    one_gradient: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of x in dy's dtype, of residual in s's, of weight and of bias; all rows (M, N) contiguous.

    statistics: mean and rstd; keep: the mask from residual_layer_norm(), and dropout's scale. one_gradient: x and
    residual have the same gradient, and None is returned for x.
    """
    rows, width = dy.shape
    dx, dresidual = None if one_gradient else torch.empty_like(dy), torch.empty_like(s)
    dweight, dbias = weight.new_empty(width), weight.new_empty(width)
    loops("norm_loops").residual_layer_norm_gradient(
        team(), rows, width, _LIKE[dy.dtype], _LIKE[s.dtype], dy.data_ptr(), 0 if ds is None else ds.data_ptr(),
        s.data_ptr(), statistics[0].data_ptr(), statistics[1].data_ptr(), weight.data_ptr(), keep.data_ptr(),
        np.float32(scale), 0 if dx is None else dx.data_ptr(), dresidual.data_ptr(), dweight.data_ptr(),
        dbias.data_ptr(),
    )  # fmt: skip
    return dx, dresidual, dweight, dbias


def embedding_gradient(
    grad: Tensor, tokens: Tensor, vocabulary: int, pad_id: int | None, keep: Tensor, kept_scale: float, scale: float
) -> Tensor:
    """The gradient (vocabulary, N) of an embedding table in grad's dtype.

    grad (B, L, N): of the embedded tokens (B, L) int64 or int32, both contiguous. keep: dropout's mask (B * L, N) bool,
    or empty; kept_scale: its scale.
    """
    width = grad.shape[-1]
    out = grad.new_empty(vocabulary, width)
    loops("embedding_loops").embedding_gradient(
        team(), tokens.numel(), width, vocabulary, _LIKE[grad.dtype], _LIKE[tokens.dtype], grad.data_ptr(),
        tokens.data_ptr(), -1 if pad_id is None else pad_id, keep.data_ptr(), np.float32(kept_scale),
        np.float32(scale), out.data_ptr(),
    )  # fmt: skip
    return out


def cross_entropy(
    logits: Tensor, target: Tensor, counted: Tensor | None, label_smoothing: float, scale: Tensor | None,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Row losses with and without smoothing (2, M), and each row's largest logit and its probability (2, M).

    logits (M, V) contiguous. gradient: as for loss.plain(), with scale.
    """
    losses, statistics = (logits.new_empty(2, len(logits), dtype=torch.float32) for _ in range(2))
    loops("training_loops").cross_entropy(
        team(), array(logits), target.numpy(), _counts(target, counted), np.float32(label_smoothing),
        np.float32(1.0 if scale is None else float(scale)), gradient is not None, array(losses), array(statistics),
        array(logits if gradient is None else gradient),
    )  # fmt: skip
    return losses, statistics


def cross_entropy_gradient(
    logits: Tensor, target: Tensor, counted: Tensor | None, label_smoothing: float, scale: Tensor, statistics: Tensor
) -> Tensor:
    """The gradient of logits (M, V) contiguous; statistics from cross_entropy()."""
    gradient = torch.empty_like(logits)
    loops("training_loops").cross_entropy_gradient(
        team(), array(logits), target.numpy(), _counts(target, counted), np.float32(label_smoothing),
        np.float32(float(scale)), array(statistics), array(gradient),
    )  # fmt: skip
    return gradient


def _counts(target: Tensor, counted: Tensor | None) -> np.ndarray:
    return np.ones(len(target), np.uint8) if counted is None else counted.view(torch.uint8).numpy()


def unsigned(seed: Tensor) -> np.uint64:
    """The seed's 64 bits as unsigned."""
    return np.uint64(int(seed.item()) & 0xFFFFFFFFFFFFFFFF)


def _has_team() -> bool:
    """Return whether loops can run on all of PyTorch's threads, or those are few."""
    if torch.get_num_threads() <= THREADS_ALONE:
        return True
    from fasttfm.cpu import thread_team

    return thread_team.start() > 0
