"""Linear layers for inference on a CPU, which lay each weight out once for products of few rows.

A search multiplies the same matrices by a few rows, hundreds of times. torch.nn.functional.linear passes float32 to a
library that repacks the matrix in every call, and for few rows that costs more than the product. Here float32 uses our
own products of weights in panels (panels.py), bfloat16 too where the processor has instructions for it, half precision
elsewhere oneDNN's prepacked ones. benchmarks/results, group decoding, has the times of whole searches.
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
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as nnF

from fasttfm.cpu import int8 as integers
from fasttfm.cpu import step_passes
from fasttfm.cpu.int8 import Int8Product
from fasttfm.cpu.row_classes import Product, RowClasses, multiply, row_classes

PACKED_WEIGHT = 1 << 15
"""Least number of elements of a weight that oneDNN packs: for smaller ones the call costs more than it saves, on two
cores of an AMD EPYC with AVX-512. The last bits of a search depend on it."""

_LINES, _LINE = 8, 16
"""Least number of runs of elements that show whether a weight has changed, and elements of a run: one cache line of
float32, as fetching lines takes the time."""

_of_models: WeakKeyDictionary[nn.Module, tuple[list, Tensor, dict[tuple, _Packed]]] = WeakKeyDictionary()
"""Model -> identity of its weights, a sample of them, and their packed forms by what _packed() is asked for."""
_unchanging: WeakSet[nn.Module] = WeakSet()
"""Models of never_changes()."""


class _Thread(threading.local):
    """State of frozen_weights() on this thread."""

    kept: dict[tuple, _Packed] | None = None
    model: nn.Module | None = None
    batch_invariant = False
    int8 = False


on_this_thread = _Thread()
_lock = threading.Lock()
"""Held while a weight is packed: threads that search with one model share the packed weights."""


@contextmanager
def frozen_weights(model: nn.Module, *, batch_invariant: bool = False, int8: bool = False) -> Iterator[None]:
    """Inside, on this thread, linear() caches packed forms of the model's weights, which must not change meanwhile.

    The cache outlives the block and is dropped when weights have changed: replaced, written to (PyTorch's version
    counter), or trained (fused optimizers do not count versions, so a sample of every weight is compared; a few
    elements written through `parameter.data` go unnoticed). It is a second copy of the weights in memory, for as long
    as the model lives. Only calls without gradients on a CPU use it. batch_invariant: a row of linear(), and a sequence
    of attention with key_lengths, has the same bits whatever else is in the batch. int8: linear() multiplies 8-bit
    integers (cpu/int8.py) where int8.route() does.
    """
    kept = on_this_thread.kept if froze(model) else _kept_of(model)
    state = vars(on_this_thread)
    before = state.copy()
    state.update(kept=kept, model=model, batch_invariant=batch_invariant, int8=int8 and integers.route() is not None)
    try:
        yield
    finally:
        state.clear()
        state.update(before)


def never_changes(model: nn.Module) -> None:
    """Keep the model's packed weights without looking for changes from now on, as in a process that only searches."""
    _unchanging.add(model)


def froze(model: nn.Module) -> bool:
    """Return whether this thread is inside frozen_weights() of this model."""
    return on_this_thread.model is model


def _kept_of(model: nn.Module) -> dict[tuple, _Packed] | None:
    """The packed weights of a model, an empty dict if they have changed; None for models that are not on a CPU."""
    if (first := next(model.parameters(), None)) is not None and not first.is_cpu:
        return None
    if model in _unchanging and model in _of_models:
        return _of_models[model][2]
    parameters = list(model.parameters())
    if not {(type(p), p.device.type) for p in parameters} <= {(nn.Parameter, "cpu")}:
        return None
    try:
        now = [(p.data_ptr(), p._version) for p in parameters]
    except RuntimeError:  # tensors made under inference mode have no version counter
        return {}
    with torch.no_grad():
        sample = torch.cat([_sample(p) for p in parameters])  # shows any step of an optimizer
    cached = _of_models.get(model)
    if cached is None or cached[0] != now or not torch.equal(cached[1], sample):
        cached = _of_models[model] = (now, sample, {})
    return cached[2]


def _sample(weight: Tensor) -> Tensor:
    """Elements from all over a weight, at most about 2 * _LINES * _LINE."""
    flat = weight.flatten()
    lines = len(flat) // _LINE
    return flat if lines <= _LINES else flat[: lines * _LINE].view(lines, _LINE)[:: lines // _LINES].flatten()


def frozen(x: Tensor) -> bool:
    """Return whether linear(x, ...) uses packed weights: inside frozen_weights(), without gradients, x on a CPU."""
    return (
        on_this_thread.kept is not None
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and type(x) is Tensor
    )


def frozen_in_int8() -> bool:
    """Return whether linear() multiplies 8-bit integers on this thread."""
    return on_this_thread.int8


def batch_invariant(x: Tensor) -> bool:
    """Return whether results for x must not depend on the rest of its batch."""
    return on_this_thread.batch_invariant and frozen(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """x weight^T + bias as torch.nn.functional.linear computes it, then max(0, .) with relu.

    x (..., K), weight (N, K), bias (N,); returns (..., N). weight must be a parameter or a view of one.
    """
    if weight.is_meta and not x.is_meta:  # torch would return uninitialised memory
        raise ValueError(f"weight {tuple(weight.shape)} is on meta and x on {x.device}: load it first")
    if on_this_thread.kept is None or not frozen(x):
        y = nnF.linear(x, weight, bias)
        return y.relu_() if relu else y
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
    rows = x.reshape(-1, x.shape[-1])
    if rows.dtype != dtype:
        rows = rows.to(dtype)
    packed = _packed(on_this_thread.kept, weight, bias, dtype, relu)
    classes = _classes(packed, bias is None, dtype, relu)
    y = packed.product(rows) if classes is None else multiply(packed.product, rows, classes)
    return y.view(*x.shape[:-1], weight.shape[0])


class FrozenLinear:
    """linear() of one weight inside frozen_weights(), looked up once; in int8 the product of integers alone.

    Construct it where frozen(). temporary: the weight is not a parameter, and its packed form is not cached.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, relu: bool = False, temporary: bool = False) -> None:
        self.int8 = on_this_thread.int8
        self.outputs = weight.shape[0]
        self.bias = None
        """In int8 a float32 array (N,), to be added to the scaled sums; else None."""
        cache = {} if temporary or on_this_thread.kept is None else on_this_thread.kept
        packed = _packed(cache, weight, bias, weight.dtype, relu)
        self._classes_of = functools.partial(_classes, packed, bias is None, weight.dtype, relu)
        self._product: Product = packed.product
        if isinstance(packed.product, Int8Product):
            self._product, self.bias = packed.product.multiply, packed.product.bias.numpy()
            self._scaled = packed.product.scaled

    def size(self, rows: int) -> int:
        """The row count that `rows` rows are padded to."""
        classes = self._classes_of()
        sizes = () if classes is None else classes.sizes
        place = bisect_left(sizes, rows)
        return sizes[place] if place < len(sizes) else rows

    def add_to(self, launches: Any, rows: Tensor, out: Tensor, scales: Any = None) -> Any:
        """Add to Launches the product of the content of rows (M, K), written to out (M, N); returns out as an array.

        scales (M,): of integer rows, to apply with the bias.
        """
        product: Any = self._product if scales is None else self._scaled
        if (launch := getattr(product, "launch", None)) is not None:
            launches.add(*launch(rows, out, scales))
        elif scales is not None:
            launches.call(lambda: out.copy_(product(rows, torch.from_numpy(scales))))
        else:
            classes = self._classes_of()
            if classes is not None and (len(rows) not in classes.sizes or classes.one_thread):
                product = functools.partial(multiply, product, classes=classes)
            launches.call(lambda: out.copy_(product(rows)))
        return step_passes.array(out)


def first_of(memory: Tensor, rows: int, columns: int) -> Tensor:
    """The beginning of flat memory as (rows, columns)."""
    return memory[: rows * columns].view(rows, columns)


def kept_with_weights(key: tuple, make: Callable[[], Any]) -> Any:
    """The result of make(), cached under this key until the weights change."""
    kept: Any = on_this_thread.kept
    key = (*key, on_this_thread.batch_invariant, on_this_thread.int8, torch.get_num_threads())
    if key not in kept:
        kept[key] = make()
    return kept[key]


@dataclass(slots=True)
class _Packed:
    """A weight as its product reads it."""

    weight: Tensor
    """The original, kept alive so that its address stays its own."""
    prepacked: bool
    """Whether the weight was laid out anew."""
    product: Product
    like: Callable[[Tensor, Tensor], Product]
    """Makes the same kind of product of another weight and bias."""
    invariant: bool
    """Whether the bits of a row are independent of the row count."""
    classes: dict[int, RowClasses] = field(default_factory=dict)
    """RowClasses by number of threads, as calls need them."""


def _packed(
    cache: dict[tuple, _Packed], weight: Tensor, bias: Tensor | None, dtype: torch.dtype, relu: bool
) -> _Packed:
    key = (weight.data_ptr(), weight.shape, None if bias is None else bias.data_ptr(), dtype, relu, on_this_thread.int8)
    if key not in cache:
        with _lock:
            if key not in cache:  # another thread may have packed it meanwhile
                cache[key] = _pack(weight, bias, dtype, relu)
    return cache[key]


def _pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, relu: bool) -> _Packed:
    if on_this_thread.int8:
        make: Callable[..., Product] = functools.partial(Int8Product, relu=relu)
        return _Packed(weight, True, make(weight, bias), make, invariant=True)
    panels = weight.shape[1] % 4 == 0 and dtype in _panel_dtypes()
    prepacked = panels or (weight.numel() >= PACKED_WEIGHT and dtype in _packed_dtypes())
    make = _panel_product if panels else _packed_product if prepacked else _plain_product

    def like(weight: Tensor, other_bias: Tensor) -> Product:
        return make(weight, None if bias is None else other_bias, dtype, relu)

    return _Packed(weight, prepacked, make(weight, bias, dtype, relu), like, panels)


def _classes(packed: _Packed, no_bias: bool, dtype: torch.dtype, relu: bool) -> RowClasses | None:
    """Row counts that the product is composed of; None for any count."""
    if packed.invariant or not on_this_thread.batch_invariant:
        return None
    threads = torch.get_num_threads()
    if threads not in packed.classes:
        outputs, inputs = packed.weight.shape
        packed.classes[threads] = row_classes(packed.like, outputs, inputs, dtype, (no_bias, relu, packed.prepacked))
    return packed.classes[threads]


def product_routes() -> dict[str, str | None]:
    """Return the backends of products with frozen weights by precision: "panels", "tiles" for panels in tile registers,
    or PyTorch; None where int8 computes in float32."""
    routes: dict[str, str | None] = {"int8": integers.route()}
    for dtype in (torch.bfloat16, torch.float32):
        routes[str(dtype).removeprefix("torch.")] = "panels" if dtype in _panel_dtypes() else "PyTorch"
    if "panels" in routes.values():
        from fasttfm.cpu import amx

        wide = {name for name in routes if name != "float32" and amx.usable()}
        routes |= {name: "tiles" for name in wide if routes[name] == "panels"}
    return routes


def _panel_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes that panels.py multiplies."""
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
    """Return whether this processor multiplies the half precision at least as fast as float32; True off x86, where it
    was not measured."""
    return platform.machine() not in ("x86_64", "AMD64") or dtype in _packed_dtypes()


@functools.cache
def _packed_dtypes() -> tuple[torch.dtype, ...]:
    """Return the half precisions for which this torch and this processor prepack weights.

    Both operators are internals of torch.compile, without a documented interface.
    """
    if not (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    ):
        return ()
    supported = ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported"))
    return tuple(
        dtype for dtype, name in supported if hasattr(torch.ops.mkldnn, name) and getattr(torch.ops.mkldnn, name)()
    )
