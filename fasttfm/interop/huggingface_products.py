"""Attention that a model of transformers writes out, product by product, on the one operator.

Some forty modeling files (BLOOM, MPT, GPT-J, MPNet, SAM) do not ask transformers for their attention by name: their own
forward multiplies queries and keys, scales, adds biases and masks, takes the softmax and multiplies the values. Each
class is exchanged for a derived one, and while its forward runs, a product of queries and keys is put off: Products
remembers what is done to it, up to the product with the values, which is F.attention(). Whatever else is done with it,
or asked of it, computes it as written, so that the numbers are the model's own in any case.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fasttfm import functional as F

OF_ITS_OWN = frozenset({
    "big_bird", "bigbird_pegasus", "evolla", "ibert", "led", "longformer", "longt5", "nystromformer", "pegasus_x",
    "vits",
})  # fmt: skip
"""Folders of transformers whose attention is something else: sparse, of integers, with weights that are used twice."""


@functools.cache
def writes_out(kind: Any) -> bool:
    """Return whether kind is a class of attention that computes it in products of its own, which can be put off."""
    file = kind.__module__.split(".")
    attends = issubclass(kind, nn.Module) and kind.__name__.endswith("Attention") and not issubclass(kind, WrittenOut)
    if not attends or file[0] != "transformers" or file[-2] in OF_ITS_OWN:
        return False
    source = inspect.getsource(kind).lower()
    products = ("matmul(", "bmm(", "matmul_qk(", " @ ")
    written = "softmax(" in source and any(each in source for each in products)
    return (written or "scaled_dot_product_attention(" in source) and "get_interface(" not in source


class WrittenOut:
    """The mixin of the derived classes that fused() makes."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """The forward of the class that this one stands for, its products put off."""
        if torch.compiler.is_compiling():
            return super().forward(*arguments, **options)  # type: ignore[misc]
        with _PutOff():
            return super().forward(*arguments, **options)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self).__bases__[1],), self.__dict__


def _made(kind: Any) -> nn.Module:
    return fused(kind).__new__(fused(kind))


@functools.cache
def fused(kind: Any) -> type[nn.Module]:
    """Return the class derived from kind whose products are one operator."""
    return type(f"Fused{kind.__name__}", (WrittenOut, kind), {"__doc__": kind.__doc__, "__module__": __name__})


class Step(NamedTuple):
    """A product of queries and keys with all that was done to it so far."""

    query: Tensor
    key: Tensor
    """(..., D, S), as the product took it."""
    shape: tuple[int, ...]
    """(B, H, L, S) or (B * H, L, S)."""
    dtype: torch.dtype
    scale: float = 1.0
    lead: tuple[int, ...] = ()
    """(B, H), once a shape had both."""
    added: tuple[tuple[Tensor, int], ...] = ()
    """What was added, each with the number of dimensions that the product then had."""
    softmax: bool = False
    dropout_p: float = 0.0

    def plus(self, added: Tensor) -> "Step | None":
        if self.softmax or not added.is_floating_point() or not _fits(added.shape, self.shape):
            return None
        return self._replace(added=(*self.added, (added, len(self.shape))))

    def times(self, factor: Any) -> "Step | None":
        if self.softmax or (isinstance(factor, Tensor) and factor.dim()):
            return None
        added = tuple((x * factor, dims) for x, dims in self.added)
        if isinstance(factor, Tensor):
            return self._replace(query=self.query * factor, added=added)
        return self._replace(scale=self.scale * factor, added=added)

    def shaped(self, shape: tuple[int, ...]) -> "Step | None":
        if shape[-2:] != self.shape[-2:] or len(shape) not in (3, 4):
            return None
        lead = shape[:2] if len(shape) == 4 else self.lead
        return self._replace(shape=shape, lead=lead) if not self.lead or lead == self.lead else None

    def output(self, value: Tensor) -> Tensor | None:
        """The product with the values: None where it is no attention."""
        if not self.softmax or value.dim() != len(self.shape) or value.shape[-2] != self.shape[-1]:
            return None
        if value.shape[:-2] != self.key.shape[:-2] and math.prod(value.shape[:-2]) != math.prod(self.shape[:-2]):
            return None
        lead = self.lead or (self.shape[0], 1)
        query, key, values = (_headed(x, lead) for x in (self.query, self.key.transpose(-1, -2), value))
        masks = [_headed_mask(x, dims, lead) for x, dims in self.added]
        precise = torch.promote_types(query.dtype, values.dtype)
        output = F.attention(
            query.to(precise), key.to(precise), values.to(precise), scale=self.scale, dropout_p=self.dropout_p,
            mask=functools.reduce(torch.add, masks) if masks else None,
        )  # fmt: skip
        return output.reshape(*self.shape[:-1], value.shape[-1]).to(value.dtype)


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(shape[::-1], whole[::-1]))


def _headed(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(B, H, N, D) of (B * H, N, D)."""
    return x if x.dim() == 4 else x.reshape(*lead, *x.shape[-2:])


def _headed_mask(x: Tensor, dims: int, lead: tuple[int, ...]) -> Tensor:
    """x, which was added to scores of so many dimensions, as it is added to (B, H, L, S)."""
    x = x.view(*[1] * (dims - x.dim()), *x.shape)
    if dims == 4:
        return x
    return x[:, None] if x.shape[0] == 1 else x.reshape(*lead, *x.shape[1:])


class Products(Tensor):
    """A product of queries and keys, or what became of it, that is not computed before it is asked for."""

    step: Step
    compute: Callable[[], Tensor]

    @staticmethod
    def of(step: Step, compute: Callable[[], Tensor]) -> "Products":
        """compute: gives the tensor that this stands for."""
        this = torch.Tensor._make_subclass(Products, torch.empty(step.shape, dtype=step.dtype, device="meta"))
        this.step, this.compute = step, functools.cache(compute)
        return this

    def become(self, step: Step, func: Any, args: tuple[Any, ...]) -> "Products":
        """Becomes the step that func, which works in place, makes of this."""
        before = Products.of(self.step, self.compute)
        args = tuple(before if x is self else x for x in args)
        self.step, self.compute = step, functools.cache(lambda: _computed(_FRESH[func], args, {}))
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = next((x for x in args if isinstance(x, Products)), None)
        if func in _OF_SHAPE:
            return super().__torch_function__(func, types, args, kwargs)
        if first is not None:
            if func is Tensor.device.__get__:
                return first.step.query.device
            found = _next(func, first.step, args, kwargs)
            if isinstance(found, Step) and func in _FRESH:
                return first.become(found, func, args)
            if isinstance(found, Step):
                return cls.of(found, lambda: _computed(func, args, kwargs))
            if found is not None:
                return found
        return _computed(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.compute())


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(lambda x: x.compute() if isinstance(x, Products) else x, (args, kwargs))
    return func(*args, **kwargs)


_OF_SHAPE = frozenset({
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.ndim.__get__, Tensor.size, Tensor.dim, Tensor.numel,  # type: ignore[attr-defined]
    Tensor.is_floating_point,
})  # fmt: skip
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm})
_ADDITIONS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_})
_TIMES = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_})
_DIVISIONS = frozenset({torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_})
_FRESH: dict[Any, Any] = {Tensor.add_: Tensor.add, Tensor.mul_: Tensor.mul, Tensor.div_: Tensor.div}
"""For an operation in place the one that leaves what it was given alone."""
_LOWEST = -1e4
"""What is filled in where a query must not attend is no higher."""


def _next(func: Any, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | Tensor | None:
    """The product among func's arguments after func: put off still, or the operator's output; None for what is not of
    attention."""
    first, rest = args[0], args[1:]
    if func in _PRODUCTS:
        return step.output(rest[0]) if isinstance(first, Products) and type(rest[0]) is Tensor else None
    if func in _ADDITIONS and not kwargs:
        other = rest[0] if isinstance(first, Products) else first
        return step.plus(other) if isinstance(other, Tensor) and not isinstance(other, Products) else None
    if func is torch.where and len(args) == 3 and rest[0] is not None and isinstance(rest[0], Products):
        return _filled(step, ~first, rest[1])
    if not isinstance(first, Products) or any(isinstance(x, Products) for x in rest):
        return None
    if func in _TIMES:
        return step.times(rest[0])
    if func in _DIVISIONS and not kwargs:
        return step.times(1 / rest[0])
    if func is Tensor.masked_fill:
        return _filled(step, *rest)
    if func in (torch.max, torch.maximum) and rest and isinstance(rest[0], Tensor) and rest[0].dim() == 0:
        return step if float(rest[0]) <= torch.finfo(torch.float16).min else None
    if func in (nn.functional.softmax, torch.softmax, Tensor.softmax):
        dim, dtype = rest[0] if rest else kwargs.get("dim"), kwargs.get("dtype")
        once = not step.softmax and dim in (-1, len(step.shape) - 1) and len(rest) < 2
        return step._replace(softmax=True, dtype=dtype or step.dtype) if once else None
    if func is nn.functional.dropout:
        given = inspect.signature(nn.functional.dropout).bind(*args, **kwargs).arguments
        p = given.get("p", 0.5) if given.get("training", True) else 0.0
        return step._replace(dropout_p=p) if step.softmax and not step.dropout_p else None
    if func in (Tensor.view, Tensor.reshape) and not isinstance(rest[0], torch.dtype):
        return step.shaped(tuple(torch.empty(step.shape, device="meta").reshape(*rest).shape))
    if func is Tensor.contiguous:
        return step
    return _cast(func, step, rest, kwargs)


def _cast(func: Any, step: Step, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
    if func is Tensor.float:
        return step._replace(dtype=torch.float32)
    if func is Tensor.type_as:
        return step._replace(dtype=rest[0].dtype)
    if func in (Tensor.to, Tensor.type) and not kwargs and len(rest) == 1 and isinstance(rest[0], torch.dtype):
        return step._replace(dtype=rest[0])
    return None


def _filled(step: Step, hidden: Tensor, value: Any) -> Step | None:
    """value where hidden says so, which as good as hides the key."""
    if (isinstance(value, Tensor) and value.dim()) or float(value) > _LOWEST or hidden.dtype != torch.bool:
        return None
    return step.plus(torch.zeros(hidden.shape, dtype=step.query.dtype, device=hidden.device).masked_fill(hidden, value))


class _PutOff(TorchFunctionMode):
    """Puts products of two tensors of three or four dimensions off, and computes torch's attention by ours."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        step = None
        if func is nn.functional.scaled_dot_product_attention and args and args[0].dim() == 4:
            return _of_torch(*args, **kwargs)
        if func in _PRODUCTS and len(args) == 2:
            step = _begun(*args)
        elif func in (torch.baddbmm, Tensor.baddbmm):
            step = _begun_with_bias(*args, **kwargs)
        return func(*args, **kwargs) if step is None else Products.of(step, lambda: func(*args, **kwargs))


def _of_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return F.attention(query, key, value, mask=attn_mask, causal=is_causal, dropout_p=dropout_p, scale=scale)


def _begun(query: Tensor, key: Tensor) -> Step | None:
    if type(query) is not Tensor or type(key) is not Tensor or query.dtype != key.dtype:
        return None
    if query.dim() != key.dim() or query.dim() not in (3, 4) or not query.is_floating_point():
        return None
    shared = query.dim() == 4 and key.shape[:2] == (query.shape[0], 1)
    if (query.shape[:-2] != key.shape[:-2] and not shared) or query.shape[-1] != key.shape[-2] or not query.shape[-1]:
        return None
    lead = tuple(query.shape[:2]) if query.dim() == 4 else ()
    return Step(query, key, (*query.shape[:-1], key.shape[-1]), query.dtype, lead=lead)


def _begun_with_bias(bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Step | None:
    step = _begun(batch1, batch2)
    return None if step is None else step._replace(scale=float(alpha)).plus(bias * beta)
