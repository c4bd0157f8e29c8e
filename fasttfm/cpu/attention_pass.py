"""Fused attention and its gradients for float32 on a CPU.

PyTorch multiplies all planes, and writes and reads the scores for every step between; its fused kernel has no soft cap,
no sinks and a slow backward pass. Here a block of queries goes through all steps in the cache (attention_loops.py). The
forward pass saves the log-sum-exp and, for short rows, the weights; dropout's mask is drawn again.
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
"""Value of an additive mask that hides a key in the loops."""
_MULTIPLE = 16
ATTENTION_LOOP = 1 << 15
"""Least number of query elements for the fused float32 loops, outside a search and on the processors of PANELS.
Measured on two cores of AMD EPYCs, with AVX2 and with AVX-512."""
SAVED_KEYS, SAVED_WEIGHTS = 256, 1 << 22
"""Most keys of a row, and most weights in all (16 MiB), at which the weights are saved for the backward pass."""
_FAR = 1 << 30
_LARGEST_SINK = 1e30


def takes(query: Tensor, key: Tensor, value: Tensor, options: Any) -> bool:
    """Return whether the fused loops support these (B, H, L, D), (B, Hk, S, D), (B, Hk, S, Dv) and are faster."""
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


def saves_weights(rows: int, keys: int, options: Any) -> bool:
    """Return whether a forward pass with gradients saves its weights, of `rows` queries over all heads and `keys` keys.
    The gradient of a soft cap needs the scores."""
    return keys <= SAVED_KEYS and rows * keys <= SAVED_WEIGHTS and not options.softcap


def weighs(query: Tensor, key: Tensor, options: Any) -> bool:
    """Return whether weights() and scores_gradient() support these (B, H, L, D) and (B, Hk, S, D) and are faster; they
    ignore window, soft cap, slopes and sinks."""
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
    """The weights before dropout (B, H, L, S) in query's dtype, if weighs()."""
    return _weights(query, key, options, None, None)


def scores_gradient(grad: Tensor, value: Tensor, p: Tensor, kept: Tensor | None, options: Any) -> Tensor:
    """The gradient of Q K^T (B, H, L, S) in p's dtype, if weighs(); grad: the output's.

    p: the weights before dropout; kept: after it, None without dropout; both contiguous.
    """
    return _weights(grad, value, options, p, p if kept is None else kept)


def _weights(x: Tensor, y: Tensor, options: Any, before: Tensor | None, after: Tensor | None) -> Tensor:
    out = x.new_empty(*x.shape[:3], y.shape[2])
    shape = (*x.shape[:2], y.shape[1], x.shape[2], *y.shape[2:], 0)
    mask_args, params, _ = _options(x, y, options)
    arrays, strides = _flat(x, y)
    even = all(step % 2 == 0 for steps in strides for step in steps)
    if _multiplies_pairs(x) and even and all(each.ctypes.data % 4 == 0 for each in arrays):
        arrays, shape = tuple(each.view(np.uint32) for each in arrays), (*shape[:5], shape[5] // 2, 0)
        strides = tuple(tuple(step // 2 for step in steps) for steps in strides)
    training_passes.loops("attention_loops").weights(
        training_passes.team(), shape, arrays, strides, mask_args, params, _array(before, out), _array(after, out),
        _array(out, out),
    )  # fmt: skip
    return out


def _multiplies_pairs(x: Tensor) -> bool:
    """Return whether the processor has an instruction for pairs of x's dtype."""
    return x.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()


def forward(call: Any, output: Tensor, lse: Tensor, weights: Tensor | None) -> None:
    """Write output (B, H, L, Dv), the base-2 log-sum-exp lse (B, H, L), sinks included, and weights (*, L, S).

    call: of attention, as in functional/attention/call.py; with packed sequences each batch row of the (B, H, T, .)
    views shows all rows. weights: before dropout, in the order of lse, contiguous; None to save none.
    """
    query, key, value = call.heads
    (out, of_rows), (out_strides, lse_strides) = _flat(output, lse[..., None])
    shape, spans = _problem(query, key, value, call.sequences)
    training_passes.loops("attention_loops").attention(
        training_passes.team(), shape, *_flat(query, key, value), spans, *_options(query, key, call), out, out_strides,
        of_rows, lse_strides, _array(weights, lse),
    )  # fmt: skip


def backward(
    call: Any, grad: Tensor, output: Tensor, lse: Tensor, weights: Tensor | None, gradients: tuple[Tensor, ...]
) -> None:
    """Write the gradients of query, key and value from grad, the output's, and the results of forward()."""
    query, key, value = call.heads
    (of_rows,), (lse_strides,) = _flat(lse[..., None])
    shape, spans = _problem(query, key, value, call.sequences)
    training_passes.loops("attention_loops").attention_gradient(
        training_passes.team(), shape, *_flat(query, key, value, output, grad), spans, *_options(query, key, call),
        of_rows, lse_strides, _array(weights, lse), *_flat(*gradients),
    )  # fmt: skip


def _array(x: Tensor | None, like: Tensor) -> Any:
    """The contiguous x as a flat array; for None an empty one of like's dtype."""
    return array(like.new_empty(0) if x is None else x.view(-1))


def _problem(query: Tensor, key: Tensor, value: Tensor, sequences: Any) -> tuple[tuple[int, ...], tuple]:
    """shape and spans for the loops."""
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
    """The tensors as flat arrays from first to last element, and their strides but the last, which is 1."""
    arrays, strides = [], []
    for x in tensors:
        x = x.detach()
        x = x if x.stride(3) == 1 else x.contiguous()
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
        arrays.append(array(x.as_strided((span,), (1,))))
        strides.append(x.stride()[:3])
    return tuple(arrays), tuple(strides)


def _options(query: Tensor, key: Tensor, options: Any) -> tuple[tuple, tuple, tuple]:
    """mask_args, params and dropout for the loops."""
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
        sinks[:] = options.sinks.detach().float().clamp(max=_LARGEST_SINK).numpy()  # inf - inf is NaN
    mask_args = lengths, offsets, slopes, sinks, *_mask(options.mask, (batch, heads, queries, keys))
    scale, cap = np.float32(options.scale), np.float32(options.softcap)
    params = bool(options.causal), options.window, options.past, scale, cap
    dropout: tuple = np.uint64(0), np.uint64(0), 0, np.float32(1.0)
    if options.seed is not None:
        kept_scale = np.float32(reference.dropout_scale(options.dropout_p))
        threshold = reference.dropout_threshold(options.dropout_p)
        dropout = training_passes.unsigned(options.seed), np.uint64(options.site), threshold, kept_scale
    return mask_args, params, dropout


@functools.cache
def _full(batch: int, value: int) -> np.ndarray:
    return np.full(batch, value, np.int64)


def _mask(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """The additive mask, HIDDEN for hidden keys, flat, and its strides when broadcast to shape."""
    if mask is None:
        return np.zeros(1, np.float32), (0, 0, 0, -1)
    if mask.dtype == torch.bool:
        added = mask.new_zeros(mask.shape, dtype=torch.float32).masked_fill_(~mask, HIDDEN)
    else:
        added = mask.detach().float().masked_fill(mask < reference.LOWEST, HIDDEN)
    added = added.contiguous()
    return added.view(-1).numpy(), added.expand(shape).stride()
