"""Attention of float32 rows and its gradients by a loop of our own, where it is the faster way on a CPU.

PyTorch multiplies all planes, then writes and reads scores for every step between; its fused kernel has no soft cap, no
sinks and a slow backward pass. Here a block of queries goes through all of it in a cache (attention_loops.py). Only a
log-sum-exp is kept for the backward pass, and dropout's mask is drawn again.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import training_passes
from fasttfm.cpu.step_passes import PANELS, array

HIDDEN = -3e38
"""Value that hides a key in an additive mask, as the loops take it."""
_MULTIPLE = 16
ATTENTION_LOOP = 1 << 15
"""Numbers of queries from which on attention outside a search is a loop of our own, in float32, on the processors of
PANELS: measured on two cores of AMD EPYCs, with AVX2 alone and with AVX-512."""
_FAR = 1 << 30


def takes(query: Tensor, key: Tensor, value: Tensor, options: Any) -> bool:
    """Return whether the loops take these (B, H, L, D), (B, Hk, S, D), (B, Hk, S, Dv) and are the faster way."""
    if query.numel() < ATTENTION_LOOP or not query.dtype == key.dtype == value.dtype == torch.float32:
        return False
    return (
        training_passes.computable(query, key, value)
        and query.shape[3] % _MULTIPLE == value.shape[3] % _MULTIPLE == 0 < value.shape[3]
        and key.numel() > 0
        and (options.mask is None or (type(options.mask) is Tensor and not options.mask.requires_grad))
        and (options.slopes is None or (options.offsets is None and abs(options.causal_offset) < _FAR))
        and torch.backends.cpu.get_cpu_capability() in PANELS
    )


def weighs(query: Tensor, key: Tensor, options: Any) -> bool:
    """Return whether the loops take products of these (B, H, L, D) and (B, Hk, S, D) together with their softmax, or
    the gradient of it, and are the faster way. A window, a cap, slopes and sinks are not theirs."""
    if query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] < training_passes.PASS_ELEMENTS:
        return False
    return (
        training_passes.computable(query, key, dtypes=(torch.float32, torch.bfloat16, torch.float16))
        and query.dtype == key.dtype
        and query.shape[3] % _MULTIPLE == 0
        and torch.backends.cpu.get_cpu_capability() in PANELS
        and (options.mask is None or type(options.mask) is Tensor)
    )


def weights(query: Tensor, key: Tensor, options: Any) -> Tensor:
    """The weights before dropout (B, H, L, S) in query's dtype, of rows that weighs() takes."""
    return _weights(query, key, options, None, None)


def scores_gradient(grad: Tensor, value: Tensor, p: Tensor, kept: Tensor | None, options: Any) -> Tensor:
    """The gradient of Q K^T (B, H, L, S) in p's dtype, from that of the output, of rows that weighs() takes; p the
    weights before dropout, kept after it (None without dropout), contiguous."""
    return _weights(grad, value, options, p, p if kept is None else kept)


def _weights(x: Tensor, y: Tensor, options: Any, before: Tensor | None, kept: Tensor | None) -> Tensor:
    out = x.new_empty(*x.shape[:3], y.shape[2])
    none = x.new_empty(0)
    shape = (*x.shape[:2], y.shape[1], x.shape[2], *y.shape[2:], 0)
    looks, numbers, _ = _looks(x, y, options)
    flat = (array((none if each is None else each).view(-1)) for each in (before, kept, out))
    arrays, strides = _flat(x, y)
    even = all(step % 2 == 0 for steps in strides for step in steps)
    if _multiplies_pairs(x) and even and all(each.ctypes.data % 4 == 0 for each in arrays):
        arrays, shape = tuple(each.view(np.uint32) for each in arrays), (*shape[:5], shape[5] // 2, 0)
        strides = tuple(tuple(step // 2 for step in steps) for steps in strides)
    _loops().weights(training_passes.team(), shape, arrays, strides, looks, numbers, *flat)
    return out


def _multiplies_pairs(x: Tensor) -> bool:
    """Return whether there is an instruction for pairs of these numbers."""
    return x.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Any,
    out: tuple[Tensor, Tensor] | None = None,
    sequences: Any = None,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, L, Dv), heads last in memory, and the log-sum-exp (B, H, L) in base 2, sinks among it; in out,
    where that is given, and of packed sequences, as routes.forward() takes both."""
    batch, heads, queries, _ = query.shape
    if out is None:
        output = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
        out = output, query.new_empty(batch, heads, queries)
    tensors, strides = _flat(query, key, value)
    (flat, lse), (out_strides, lse_strides) = _flat(out[0], out[1][..., None])
    given = *_problem(query, key, value, sequences), *_looks(query, key, options)
    _loops().attention(
        training_passes.team(), given[0], tensors, strides, *given[1:], flat, out_strides, lse, lse_strides
    )
    return out


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    options: Any,
    out: tuple[Tensor, ...] | None = None,
    sequences: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, heads last in memory; out and sequences as forward() takes them."""
    if out is None:
        like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
        out = tuple(like(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value))
    (of_rows,), (lse_strides,) = _flat(lse[..., None])
    given = *_problem(query, key, value, sequences), *_looks(query, key, options)
    _loops().attention_gradient(
        training_passes.team(), given[0], *_flat(query, key, value, output, grad), *given[1:], of_rows, lse_strides,
        *_flat(*out),
    )  # fmt: skip
    return out  # type: ignore[return-value]


def _problem(query: Tensor, key: Tensor, value: Tensor, sequences: Any) -> tuple[tuple[int, ...], tuple]:
    """shape and spans, as the loops take them."""
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    if sequences is not None:
        queries, keys = sequences.max_seqlen_q, sequences.max_seqlen_k
        starts = [x.to(torch.int64).numpy() for x in (sequences.cu_seqlens_q, sequences.cu_seqlens_k)]
        spans = tuple(each for x in starts for each in (x[:-1].copy(), np.diff(x)))
    else:
        spans = _full(batch, 0), _full(batch, queries), _full(batch, 0), _full(batch, keys)
    return (batch, heads, key.shape[1], queries, keys, size, value.shape[3]), spans


def _flat(*tensors: Tensor) -> tuple[tuple, tuple]:
    """The tensors as flat arrays from first to last number, and their strides but the last, which is 1."""
    arrays, strides = [], []
    for x in tensors:
        x = x.detach()
        x = x if x.stride(3) == 1 else x.contiguous()
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
        arrays.append(array(x.as_strided((span,), (1,))))
        strides.append(x.stride()[:3])
    return tuple(arrays), tuple(strides)


def _looks(query: Tensor, key: Tensor, options: Any) -> tuple[tuple, tuple, tuple]:
    """looks, numbers and dropout, as the loops take them."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    lengths = _full(batch, keys) if options.key_lengths is None else options.key_lengths.to(torch.int64).numpy()
    offsets = np.full(batch, options.causal_offset, np.int64)
    if options.offsets is not None:
        offsets += options.offsets.numpy()
    slopes = np.zeros(batch * heads, np.float32)
    if options.slopes is not None:
        slopes[:] = options.slopes.float().expand(batch, heads).reshape(-1).numpy()
    sinks = np.full(heads, -np.inf, np.float32)
    if options.sinks is not None:
        sinks[:] = options.sinks.detach().float().numpy()
    looks = lengths, offsets, slopes, sinks, *_mask(options.mask, (batch, heads, queries, keys))
    scale, cap = np.float32(options.scale), np.float32(options.softcap)
    numbers = bool(options.causal), options.window, options.past, scale, cap
    return looks, numbers, _dropout(options)


@functools.cache
def _full(batch: int, keys: int) -> np.ndarray:
    return np.full(batch, keys, np.int64)


def _mask(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """A mask's numbers that are added, HIDDEN where it hides a key, and its strides as it broadcasts to shape."""
    if mask is None:
        return np.zeros(1, np.float32), (0, 0, 0, -1)
    if mask.dtype == torch.bool:
        added = mask.new_zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, HIDDEN)
    else:
        added = mask.detach().float().masked_fill(mask < reference.LOWEST, HIDDEN)
    added = added.contiguous()
    return added.view(-1).numpy(), added.expand(shape).stride()


def _dropout(options: Any) -> tuple:
    if options.seed is None:
        return np.uint64(0), np.uint64(0), 0, np.float32(1.0)
    threshold, scale = reference.dropout_threshold(options.dropout_p), reference.dropout_scale(options.dropout_p)
    return training_passes.unsigned(options.seed), np.uint64(options.site), threshold, np.float32(scale)


@functools.cache
def _loops() -> Any:
    """The module of the compiled functions, which imports numba."""
    from fasttfm.cpu import attention_loops

    return attention_loops
