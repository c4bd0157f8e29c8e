"""The backend of a call of attention.

    short, flash               one Triton kernel, for rows of few keys or of any number: kernels/attention
    softmax, explicit, fused   PyTorch's products: products.py
    blocks                     our own loop on a CPU, for float32 and everything that changes scores
    bands                      on a CPU of a window's keys alone, by fused or explicit for some queries at a time

A call is decided once, before it computes, and its backward pass takes the same backend.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasttfm.cpu import attention_pass
from fasttfm.cpu.linear import batch_invariant
from fasttfm.functional import backends
from fasttfm.functional.attention.call import Call, Options
from fasttfm.functional.backends import BACKENDS, kernels_take, values_are_checked
from fasttfm.functional.operator import Size, casts, transformed
from fasttfm.functional.subclasses import PLAIN_TENSORS

FUSED_QUERIES = FUSED_KEYS = 16
"""From so many on torch's fused CPU kernel is the faster in float32, and keeps no weights. Few queries over many keys
are a search's (models/cache.py); in bfloat16 its softmax and backward pass are slow. On two cores of an AMD EPYC with
AVX-512 forward and backward took 1.3 and 1.1 times less at 100 keys, 4.3 and 2.2 times at 1,024 under a triangle; below
64 keys forward is hardly faster, and backward takes half as long (`python -m benchmarks kernels`). A search's last bits
depend on it."""


LEAST_BAND, MOST_IN_BAND = 64, 512
"""Queries of a band."""


def backend_of(wanted: str, query: Tensor, value: Tensor, keys: Size, options: Options | Call | None = None) -> str:
    """short, flash, softmax, explicit or, for batch-invariant searches on a CPU, fused.

    wanted: auto, triton or torch, or this function's own answer, which stays. query (..., D), value (..., Dv); keys of
    the longest row; options where they may have a window. The kernels' tables decide where a kernel takes the tensors:
    by chip, dtype (float32 by whether torch allows TF32 now), head size and keys.
    """
    if wanted not in BACKENDS:
        return wanted
    device, dtype = query.device, query.dtype
    if wanted == "torch" or not kernels_take(wanted, device, dtype):
        # torch's own kernel takes one sequence after the other, PyTorch's products all of them at once
        return "fused" if batch_invariant(query) and query.shape[-1] == value.shape[-1] else "explicit"
    from fasttfm.kernels.attention import launch as attention_launch
    from fasttfm.kernels.launch import chip, product_kind

    device_chip = chip(device)
    width = attention_launch.width_class(max(query.shape[-1], value.shape[-1]))
    kind = product_kind(dtype, device_chip)
    backend = attention_launch.route(device_chip, kind, width, attention_launch.key_class(keys))
    if backend == "softmax" and options is not None and _is_narrow(options, keys):
        return "flash" if attention_launch.takes_long(device_chip, kind, width) else backend
    return backend


def _is_narrow(options: Options | Call, keys: Size) -> bool:
    """Return whether a window leaves no more than a quarter of the keys. A kernel for long rows multiplies these alone,
    at three to five times the cycles of a score: on paper, beside cuBLAS' products and the scores' way through the
    memory, by the machine code for sm_60 to sm_75."""
    return options.causal and options.window != -1 and 4 * (options.window + 1) <= keys


def cpu_backend(call: Call) -> str:
    """The backend of an eager call on a CPU where our own loop or torch's kernel is the faster way; else what was
    wanted, call.backend."""
    query, key = call.query, call.query if call.key is None else call.key
    if call.only_weights or call.backend not in BACKENDS or not _is_open(query):
        return call.backend
    if call.packed and not (call.batch and values_are_checked(query) and query.numel() and key.numel()):
        return call.backend
    if not torch.compiler.is_compiling() and attention_pass.takes(*call.heads, call):
        return "blocks"
    if _is_banded(call):
        return "bands"
    is_heads = call.value is not None and not call.packed
    return "fused" if is_heads and takes_fused(*call[:3], call) else call.backend  # type: ignore[arg-type]


def _is_open(query: Tensor) -> bool:
    """Return whether a CPU may compute it by something other than the products: of transforms torch's kernel knows
    little."""
    return (
        query.is_cpu
        and backends.current != "triton"
        and not casts(query)
        and not (transformed() or forward_ad._current_level >= 0)
    )


def _is_banded(call: Call) -> bool:
    """Return whether a window leaves out keys that are known. Dropout draws for whole rows, and a graph of
    torch.compile must not depend on lengths."""
    batch, _, queries, keys = call.sizes
    return (
        call.window != -1
        and call.causal
        and call.seed is None
        and call.value is not None
        and not torch.compiler.is_compiling()
        and batch * queries > 0
        and call.window + LEAST_BAND < keys
        and (call.offsets is None or values_are_checked(call.offsets))  # the bands depend on their values
    )


def takes_fused(query: Tensor, key: Tensor, value: Tensor, options: Options | Call) -> bool:
    """Return whether torch's own CPU kernel is the faster way for these heads, gradients too."""
    return (
        options.seed is None
        and options.softcap == 0.0
        and _is_open(query)
        and PLAIN_TENSORS.issuperset(map(type, (query, key, value)))
        and query.dtype == key.dtype == value.dtype == torch.float32
        and options.scale > 0.0  # its masks are -inf times the scale
        and value.shape[3] == query.shape[3]
        and _long(query, key)
        and not (options.mask is not None and options.mask.requires_grad)
    )


def _long(query: Tensor, key: Tensor) -> bool:
    """Tell if torch's kernel is the faster way at these lengths. Where a graph leaves a length open, nothing may depend
    on it: the graph would hold for the lengths of its example alone."""
    conditions = (query.shape[2] >= FUSED_QUERIES, key.shape[2] >= FUSED_KEYS, query.shape[0] > 0, query.shape[1] > 0)
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return all(statically_known_true(condition) for condition in conditions)
    return all(conditions)
