"""Choice of the backend of an attention call.

    short, flash               one Triton kernel, for few keys or any number: kernels/attention
    softmax, explicit, fused   PyTorch's matrix products: products.py
    blocks                     compiled CPU loop, for float32 and all score modifications
    bands                      CPU, windows: fused or explicit on some queries at a time, over the keys in their window

The choice is made once, before the forward pass; the backward pass takes the same backend.
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
from fasttfm.system.machine import processor_units

FUSED_QUERIES = FUSED_KEYS = 16
"""Fewest queries and keys for torch's fused CPU kernel in float32, which saves no weights. Few queries over many keys
are a search step (models/cache.py); in bfloat16 softmax and backward pass are slow. On two cores of an AMD EPYC with
AVX-512 forward and backward took 1.3 and 1.1 times less at 100 keys, 4.3 and 2.2 times at 1,024 if causal; below 64
keys forward is hardly faster, and backward takes half as long (`python -m benchmarks kernels`). The last bits of a
search depend on it."""


LEAST_BFLOAT16_KEYS = 64
_HAS_TILES = "amx_bf16" in processor_units()
LEAST_BAND, MOST_IN_BAND = 64, 512
"""Fewest and most queries in a band."""


def backend_of(requested: str, query: Tensor, value: Tensor, keys: Size, options: Options | Call | None = None) -> str:
    """Return short, flash, softmax, explicit or, for batch-invariant searches on a CPU, fused.

    requested: auto, triton or torch, or a backend, which is returned. query (..., D), value (..., Dv); keys of the
    longest row; options, if there may be a window. If a kernel takes the tensors, its tables decide: by chip, dtype
    (float32 by torch's TF32 setting), head size and keys.
    """
    if requested not in BACKENDS:
        return requested
    device, dtype = query.device, query.dtype
    if requested == "torch" or not kernels_take(requested, device, dtype):
        # torch's kernel computes the sequences one by one; PyTorch's products batch them
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
    """Return whether a window leaves at most a quarter of the keys.

    The flash kernel computes these alone, at three to five times the cycles per score of cuBLAS' products plus the
    scores' memory traffic: an estimate from the machine code for sm_60 to sm_75.
    """
    return options.causal and options.window != -1 and 4 * (options.window + 1) <= keys


def cpu_backend(call: Call) -> str:
    """Return blocks, bands or fused for an eager CPU call where one of them is fastest; else call.backend."""
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
    """Return whether a CPU may use anything but the products; torch's kernel supports few transforms."""
    return (
        query.is_cpu
        and backends.current != "triton"
        and not casts(query)
        and not (transformed() or forward_ad._current_level >= 0)
    )


def _is_banded(call: Call) -> bool:
    """Return whether a window excludes enough keys, known now, for bands.

    Not with dropout, which is drawn for whole rows, nor under torch.compile, whose graph must not depend on lengths.
    """
    batch, _, queries, keys = call.sizes
    return (
        call.window != -1
        and call.causal
        and call.seed is None
        and call.value is not None
        and not torch.compiler.is_compiling()
        and batch * queries > 0
        and call.window + LEAST_BAND < keys
        and (call.offsets is None or values_are_checked(call.offsets))  # their values decide the bands
    )


def takes_fused(query: Tensor, key: Tensor, value: Tensor, options: Options | Call) -> bool:
    """Return whether torch's fused CPU kernel supports these heads and is faster, gradients included."""
    return (
        options.seed is None
        and options.softcap == 0.0
        and _is_open(query)
        and PLAIN_TENSORS.issuperset(map(type, (query, key, value)))
        and query.dtype == key.dtype == value.dtype
        and (query.dtype == torch.float32 or _takes_bfloat16(query, key, value))
        and options.scale > 0.0  # its masks are -inf times the scale
        and value.shape[3] == query.shape[3]
        and _long(query, key)
        and not (options.mask is not None and options.mask.requires_grad)
    )


def _takes_bfloat16(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether torch's fused CPU kernel is faster in bfloat16: where tile registers multiply, without gradients.

    On a core of a Xeon with AMX, 8 heads of 64: 1.4 times at 100 keys, 5 times at 2,048, slower at 27; with the
    backward pass slower up to 512.
    """
    eager = _HAS_TILES and not torch.compiler.is_compiling()
    if query.dtype != torch.bfloat16 or not eager or key.shape[2] < LEAST_BFLOAT16_KEYS:
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)))


def _long(query: Tensor, key: Tensor) -> bool:
    """Return whether torch's kernel is faster at these lengths; not if a graph leaves a length dynamic.

    A decision on a dynamic length would specialise the graph to its example.
    """
    conditions = (query.shape[2] >= FUSED_QUERIES, key.shape[2] >= FUSED_KEYS, query.shape[0] > 0, query.shape[1] > 0)
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return all(statically_known_true(condition) for condition in conditions)
    return all(conditions)
