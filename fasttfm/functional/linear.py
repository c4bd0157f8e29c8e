"""Linear layers of a model that is only read: on the CPU their weights are laid out once for oneDNN's products.

A search multiplies the same matrices by a few rows, hundreds of times. torch.nn.functional.linear hands float32 to a
library that lays the matrix out anew in every call, and for few rows that costs more than the product. What whole
searches gain stands in benchmarks/results, group decoding.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as nnF

_LEAST = 1 << 15
"""Elements of the smallest weight that is laid out anew: below, the call costs more than it saves."""

_ROWS = 4
"""oneDNN is quicker with as many float32 rows than with fewer: (8000, 512), one core, 1.0 ms for 4 and 1.3 for 1."""

_STRIDE = 509
"""Of the elements that are looked at to see whether a weight has changed."""

_Kept = dict[tuple, tuple]
"""By address, shape and dtype: the weight, so that nothing else gets its memory; from its second use on also what was
made of it and of its bias."""

_of_models: WeakKeyDictionary[nn.Module, tuple[tuple, _Kept]] = WeakKeyDictionary()
"""What was kept of a model's weights, and which weights these were."""
_thread = threading.local()


@contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Inside, on this thread, linear() keeps what it makes of the model's weights, which must not change meanwhile.

    It is found again the next time, unless weights have changed: replaced, written to as PyTorch counts it, or trained
    (fused optimizers are not counted, so a sample of every weight is looked at; writing a few elements through
    `parameter.data` goes unseen). Costs a second copy of the weights in memory, for as long as they stay. Only calls
    without gradients take part, and only on a CPU.
    """
    before = getattr(_thread, "kept", None)
    _thread.kept = _kept_of(model)
    try:
        yield
    finally:
        _thread.kept = before


def _kept_of(model: nn.Module) -> _Kept | None:
    parameters = list(model.parameters())
    if not _usable() or any(type(p) is not nn.Parameter or p.device.type != "cpu" for p in parameters):
        return None
    try:
        now = tuple((p.data_ptr(), p._version) for p in parameters) + _sample(parameters)
    except RuntimeError:  # made under inference mode: nobody counts their changes
        return {}
    known = _of_models.get(model)
    if known is None or known[0] != now:
        known = _of_models[model] = (now, {})
    return known[1]


@torch.no_grad()
def _sample(parameters: list[nn.Parameter]) -> tuple[float, ...]:
    """The sum over some elements of each: any step of an optimizer shows."""
    return tuple(torch.stack([p.flatten()[::_STRIDE].sum(dtype=torch.float64) for p in parameters]).tolist())


def frozen(x: Tensor) -> bool:
    """Whether linear() keeps what it makes of weights now: inside frozen_weights(), x on a CPU where it helps."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and getattr(_thread, "kept", None) is not None
        and x.device.type == "cpu"
        and type(x) is Tensor
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """x weight^T + bias as torch.nn.functional.linear computes it, then max(0, .) with relu.

    x (..., K), weight (N, K), bias (N,); returns (..., N). weight must be a parameter or a view of one.
    """
    if weight.numel() >= _LEAST and frozen(x):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        if dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16()):
            packed, bias = _packed(_thread.kept, weight, bias, dtype)
            if packed is not None:
                rows = x.reshape(-1, x.shape[-1]).to(dtype)
                count = rows.shape[0]
                if count < _ROWS and dtype == torch.float32:
                    rows = nnF.pad(rows, (0, 0, 0, _ROWS - count))
                y = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "relu" if relu else "none", [], "")
                return y[:count].view(*x.shape[:-1], weight.shape[0])
    y = nnF.linear(x, weight, bias)
    return y.relu_() if relu else y


def _packed(
    kept: _Kept, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The weight as oneDNN wants it, and the bias in dtype. The first use only notes the weight: one that is used once
    in a search, such as an encoder's, is not worth laying out."""
    place = (weight.data_ptr(), weight.shape, dtype)
    entry = kept.get(place)
    if entry is None:
        kept[place] = (weight,)
        return None, bias
    if len(entry) == 1:
        made = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype).contiguous())
        entry = kept[place] = (weight, made, None if bias is None else bias.detach().to(dtype))
    return entry[1:]


def _usable() -> bool:
    """Whether this torch has oneDNN and the two operators, which torch.compile uses but no documentation promises."""
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    )


@functools.cache
def _has_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
