"""Linear layers of a model that is only read: on the CPU their weights are laid out once, for products of few rows.

A search multiplies the same matrices by a few rows, hundreds of times. torch.nn.functional.linear hands float32 to a
library that lays the matrix out anew in every call, and for few rows that costs more than the product. Our own products
take what was laid out before (panels.py), in half precision oneDNN's. What whole searches gain stands in
benchmarks/results, group decoding.
"""

from __future__ import annotations

import functools
import platform
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as nnF

from fasttfm.cpu import int8 as integers
from fasttfm.cpu import step_passes
from fasttfm.cpu.int8 import Int8Product
from fasttfm.cpu.row_classes import Product, RowClasses, large_size, multiply, row_classes

PACKED_WEIGHT = 1 << 15
"""Elements of a weight from which on it is laid out anew: below, the call costs more than it saves, on two cores of an
AMD EPYC with AVX-512. A search's last bits depend on it."""

_STRIDE = 509
"""Of the elements that are looked at to see whether a weight has changed."""

_of_models: WeakKeyDictionary[nn.Module, tuple[list, Tensor, dict[tuple, _Kept]]] = WeakKeyDictionary()
"""By model: its weights, a sample of them, and their packed forms by address, shape, dtype and ReLU."""


class _Thread(threading.local):
    """State of frozen_weights() on this thread."""

    kept: dict[tuple, _Kept] | None = None
    model: nn.Module | None = None
    batch_invariant = False
    int8 = False


on_this_thread = _Thread()
_lock = threading.Lock()
"""Of making what is kept, which threads that search with one model share."""


@contextmanager
def frozen_weights(model: nn.Module, *, batch_invariant: bool = False, int8: bool = False) -> Iterator[None]:
    """Inside, on this thread, linear() keeps what it makes of the model's weights, which must not change meanwhile.

    It is found again the next time, unless weights have changed: replaced, written to as PyTorch counts it, or trained
    (fused optimizers are not counted, so a sample of every weight is looked at; writing a few elements through
    `parameter.data` goes unseen). Costs a second copy of the weights in memory, for as long as they stay. Only calls
    without gradients take part, and only on a CPU. batch_invariant: a row of linear(), and a sequence of attention with
    key_lengths, has the same bits whatever is computed beside it. int8: linear() multiplies 8-bit integers, as
    cpu/int8.py says, where that is exact and faster than float32 (int8.route()).
    """
    int8 = int8 and integers.route() is not None
    before = on_this_thread.kept, on_this_thread.model, on_this_thread.batch_invariant, on_this_thread.int8
    kept = on_this_thread.kept if froze(model) else _kept_of(model)
    on_this_thread.kept, on_this_thread.model, on_this_thread.batch_invariant, on_this_thread.int8 = (
        kept,
        model,
        batch_invariant,
        int8,
    )
    try:
        yield
    finally:
        on_this_thread.kept, on_this_thread.model, on_this_thread.batch_invariant, on_this_thread.int8 = before


def froze(model: nn.Module) -> bool:
    """Return whether this thread is inside frozen_weights() of this model."""
    return on_this_thread.model is model


def _kept_of(model: nn.Module) -> dict[tuple, _Kept] | None:
    if (first := next(model.parameters(), None)) is not None and not first.is_cpu:
        return None
    parameters = list(model.parameters())
    if not {(type(p), p.device.type) for p in parameters} <= {(nn.Parameter, "cpu")}:
        return None
    try:
        now = [(p.data_ptr(), p._version) for p in parameters]
    except RuntimeError:  # made under inference mode: nobody counts their changes
        return {}
    with torch.no_grad():
        sample = torch.cat([p.flatten()[::_STRIDE] for p in parameters])  # any step of an optimizer shows
    known = _of_models.get(model)
    if known is None or known[0] != now or not torch.equal(known[1], sample):
        known = _of_models[model] = (now, sample, {})
    return known[2]


def frozen(x: Tensor) -> bool:
    """Return whether linear() keeps what it makes of weights now: inside frozen_weights(), x on a CPU."""
    return (
        on_this_thread.kept is not None
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and type(x) is Tensor
    )


def frozen_in_int8() -> bool:
    """Return whether linear() multiplies 8-bit integers now."""
    return on_this_thread.int8


def batch_invariant(x: Tensor) -> bool:
    """Return whether what is computed of x now must not depend on what is computed beside it."""
    return on_this_thread.batch_invariant and frozen(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """x weight^T + bias as torch.nn.functional.linear computes it, then max(0, .) with relu.

    x (..., K), weight (N, K), bias (N,); returns (..., N). weight must be a parameter or a view of one.
    """
    if weight.is_meta and not x.is_meta:  # torch gives uninitialised memory
        raise ValueError(f"weight {tuple(weight.shape)} is on meta and x on {x.device}: load it first")
    if on_this_thread.kept is None or not frozen(x):
        y = nnF.linear(x, weight, bias)
        return y.relu_() if relu else y
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
    rows = x.reshape(-1, x.shape[-1])
    if rows.dtype != dtype:
        rows = rows.to(dtype)
    assert on_this_thread.kept is not None  # as frozen() says
    kept = _kept_product(on_this_thread.kept, weight, bias, dtype, relu, on_this_thread.int8)
    classes = _classes(kept, bias is None, dtype, relu, large_size(rows.shape[0]))
    y = kept.product(rows) if classes is None else multiply(kept.product, rows, classes)
    return y.view(*x.shape[:-1], weight.shape[0])


class FrozenLinear:
    """linear() of one weight while frozen_weights() lasts, looked up once; in int8 the integers' product alone.

    Make it where frozen(). temporary: the weight is not a parameter, and nothing is kept of it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, relu: bool = False, temporary: bool = False) -> None:
        self.int8 = on_this_thread.int8
        self.outputs = weight.shape[0]
        self.bias = None
        """(N,) float32 array, in int8: what is to be added to the scaled sums."""
        kept = _kept_product(
            {} if temporary or on_this_thread.kept is None else on_this_thread.kept,
            weight,
            bias,
            weight.dtype,
            relu,
            self.int8,
        )
        self._classes = _classes(kept, bias is None, weight.dtype, relu)
        self._product: Product = kept.product
        if isinstance(kept.product, Int8Product):
            self._product, self.bias = kept.product.multiply, kept.product.bias.numpy()

    def size(self, rows: int) -> int:
        """The number of rows that so many are filled up to."""
        sizes = () if self._classes is None else self._classes.sizes
        place = bisect_left(sizes, rows)
        return sizes[place] if place < len(sizes) else rows

    def of_rows(self, count: int) -> Product:
        """The call that takes M rows (M, K) to (M, N); in int8 rows of integers to sums scaled by output alone."""
        classes = self._classes
        if classes is not None and (count not in classes.sizes or classes.one_thread):
            return functools.partial(multiply, self._product, classes=classes)
        return self._product

    def reading(self, rows: Tensor) -> Callable[[], Any]:
        """The call that multiplies what rows (M, K) then hold, to an array as the loops take it, which may be the same
        one each time."""
        product = self.of_rows(len(rows))
        of = getattr(product, "of", None)  # PanelProduct's, which needs not look at its rows again
        return (lambda: step_passes.array(product(rows))) if of is None else of(rows)

    def followed_by(self, other: FrozenLinear, rows: Tensor) -> Callable[[], Any]:
        """The call that multiplies what rows hold by this weight and the result by another; see reading()."""
        product, last = self.of_rows(len(rows)), other.of_rows(len(rows))
        if not (hasattr(product, "of") and hasattr(last, "of")):
            return lambda: step_passes.array(last(product(rows)))
        between = rows.new_empty(len(rows), self.outputs)
        first, second = product.of(rows, between), last.of(between)

        def both() -> Any:
            first()
            return second()

        return both


def kept_with_weights(key: tuple, make: Callable[[], Any]) -> Any:
    """The result of make(), kept under this key while the weights stay what they are."""
    kept: Any = on_this_thread.kept
    key = (*key, on_this_thread.batch_invariant, on_this_thread.int8, torch.get_num_threads())
    if key not in kept:
        kept[key] = make()
    return kept[key]


def _classes(kept: _Kept, no_bias: bool, dtype: torch.dtype, relu: bool, large: int = 0) -> RowClasses | None:
    """Row counts that the product is made of, None for any; large as large_size() says. A library's of integers all
    agree, and few are used."""
    if kept.invariant:
        return None
    if on_this_thread.int8:
        return RowClasses()
    if not on_this_thread.batch_invariant:
        return None
    key = torch.get_num_threads(), large
    if key not in kept.classes:
        outputs, inputs = kept.weight.shape
        kept.classes[key] = row_classes(kept.of_kind, outputs, inputs, dtype, (no_bias, relu, kept.packed), large)
    return kept.classes[key]


@dataclass(slots=True)
class _Kept:
    """Tensors made of a weight."""

    weight: Tensor
    """The weight itself, so that nothing else gets its memory."""
    packed: bool
    """Whether it was laid out."""
    product: Product
    of_kind: Callable[[Tensor, Tensor], Product]
    """The same kind of product with another weight and bias."""
    invariant: bool = False
    """Whether a row has the same bits beside any others."""
    classes: dict[tuple[int, int], RowClasses] = field(default_factory=dict)
    """By number of threads and large row count, of those that somebody has asked for."""


def _kept_product(
    kept: dict[tuple, _Kept], weight: Tensor, bias: Tensor | None, dtype: torch.dtype, relu: bool, int8: bool
) -> _Kept:
    key = (weight.data_ptr(), weight.shape, dtype, relu, int8)
    if key in kept:
        return kept[key]
    with _lock:
        if key in kept:  # another thread was quicker
            return kept[key]
        if int8:
            of_ints = Int8Product(weight, bias, relu)
            ours = integers.route() == "panels"  # a library makes something for each new row count
            kept[key] = _Kept(weight, True, of_ints, lambda weight, bias: Int8Product(weight, bias, relu), ours)
            return kept[key]
        panels = weight.shape[1] % 4 == 0 and dtype in _panel_dtypes()
        packed = panels or (weight.numel() >= PACKED_WEIGHT and dtype in _packed_dtypes())
        make = _panel_product if panels else _packed_product if packed else _plain_product

        def of_kind(weight: Tensor, other_bias: Tensor) -> Product:
            return make(weight, None if bias is None else other_bias, dtype, relu)

        kept[key] = _Kept(weight, packed, make(weight, bias, dtype, relu), of_kind, panels)
    return kept[key]


def float32_route() -> str:
    """Return whose float32 products frozen weights are multiplied by here: "panels" or "PyTorch"."""
    return "panels" if torch.float32 in _panel_dtypes() else "PyTorch"


def _panel_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes whose products are our own."""
    if not step_passes.uses_panels():
        return ()
    from fasttfm.cpu.panels import multiplies_pairs

    return (torch.float32, torch.bfloat16) if multiplies_pairs() else (torch.float32,)


def _panel_product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, relu: bool) -> Product:
    from fasttfm.cpu.panels import PanelProduct

    return PanelProduct(weight.to(dtype), None if bias is None else bias.to(dtype), relu)


def _packed_product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, relu: bool) -> Product:
    """oneDNN's product in half precision."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype).contiguous())
    bias = None if bias is None else bias.detach().to(dtype)
    options: dict[str, Any] = {"attr": "relu" if relu else "none", "scalars": [], "algorithm": ""}
    return functools.partial(torch.ops.mkldnn._linear_pointwise, W=packed, B=bias, **options)


def _plain_product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, relu: bool) -> Product:
    weight, bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)

    def product(rows: Tensor) -> Tensor:
        y = nnF.linear(rows, weight, bias)
        return y.relu_() if relu else y

    return product


@functools.cache
def has_units(dtype: torch.dtype) -> bool:
    """Return whether products of this half precision take no longer than float32's; assumed where nobody looked."""
    return platform.machine() not in ("x86_64", "AMD64") or dtype in _packed_dtypes()


@functools.cache
def _packed_dtypes() -> tuple[torch.dtype, ...]:
    """Return the half precisions that this torch and this processor lay weights out for.

    The two operators are those of torch.compile, which no documentation promises.
    """
    if not (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    ):
        return ()
    supported = []
    for dtype, name in ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported")):
        if hasattr(torch.ops.mkldnn, name) and getattr(torch.ops.mkldnn, name)():
            supported.append(dtype)
    return tuple(supported)
