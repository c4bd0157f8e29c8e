"""Checks of results and inputs that a time depends on.

The error of a tensor is its largest difference from the float64 result over that result's largest magnitude; the worst
tensor counts. The bound is twice the error of plain PyTorch in the same dtype plus a floor, as in flash-attention's
tests; plain PyTorch itself must be right to half the dtype's digits. The floor is two units in the last place in half
precision, whose results are rounded from float32, and 32 in float32, where sums differ only by their order.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_FLOOR = {"float32": 32, "float16": 2, "bfloat16": 2}
"""Units in the last place allowed beyond twice the plain error, as in tests/gpu/test_kernels.py."""
_KINKED = 0.01
KINKED_MEASURE = "|x - float64| / max |float64| of 99 in 100"
"""Definition of kinked_error(), for the record."""


def _items(value: Any) -> list[Any] | None:
    """Items of a tuple, list, mapping or dataclass, in order; None for other types."""
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def tensors(value: Any) -> list[Tensor]:
    """Tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [x for item in _items(value) or () for x in tensors(item)]


def _mapped(value: Any, change: Any) -> Any:
    """A copy of value with each tensor replaced by change(tensor)."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _mapped(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def in_float64(inputs: tuple) -> tuple:
    """The inputs with floating-point tensors in float64, with the same requires_grad."""

    def double(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x

    return _mapped(inputs, double)


def copied(inputs: tuple) -> tuple:
    """A deep copy of the inputs."""
    return _mapped(inputs, lambda x: x.detach().clone().requires_grad_(x.requires_grad))


_cotangents: dict[tuple, Tensor] = {}


def cotangent(output: Tensor) -> Tensor:
    """Gradient of an output: 1 for a loss, else the same random numbers in each provider's layout."""
    if output.dim() == 0:
        return torch.ones_like(output)
    key = (tuple(output.shape), output.stride(), output.dtype, output.device)
    if key not in _cotangents:
        if len(_cotangents) > 64 or sum(c.nbytes for c in _cotangents.values()) > 2**31:
            _cotangents.clear()
        # exact in every dtype, so that the reference gets the same numbers
        values = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
        _cotangents[key] = torch.empty_like(output).copy_(values).detach()
    return _cotangents[key]


def relative_error(result: Any, expected: Any) -> float:
    """Largest difference over the reference's largest magnitude, of the worst tensor; infinite if shapes differ."""
    return _worst(result, expected, lambda difference: float(difference.max()))


def kinked_error(result: Any, expected: Any) -> float:
    """relative_error of 99% of the elements; the others may be off by a tenth.

    For gradients through a ReLU: at its kink the last digit decides whether a unit passes its gradient, so that a whole
    row may differ from the reference and be right.
    """

    def most(difference: Tensor) -> float:
        if not float(difference.max()) <= 0.1:
            return float(difference.max())
        kept = difference.numel() - int(_KINKED * difference.numel())
        return float(difference.flatten().kthvalue(kept).values)

    return _worst(result, expected, most)


def _worst(result: Any, expected: Any, size: Callable[[Tensor], float]) -> float:
    one, other = tensors(result), tensors(expected)
    if len(one) != len(other) or any(a.shape != b.shape for a, b in zip(one, other)):
        return float("inf")
    worst = 0.0
    for a, b in zip(one, other):
        if a.numel():
            reference = b.detach().to(a.device).double()
            error = size((a.detach().double() - reference).abs() / reference.abs().max().clamp_min(1e-30))
            worst = max(worst, error) if error == error else float("inf")
    return worst


def allowed(dtype: str, plain: float | None) -> float:
    """Bound on the error in a dtype. plain: the error of plain PyTorch, None for plain PyTorch itself."""
    eps = 2.0**-7 if dtype == "int8" else torch.finfo(getattr(torch, dtype)).eps
    return eps**0.5 if plain is None else 2 * plain + _FLOOR[dtype] * eps


def equal(one: Any, other: Any) -> bool:
    """Return whether two values of one type are equal: tensors, arrays, and nested containers and objects of them."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    items, others = _items(one), _items(other)
    if items is None or others is None:
        by_identity = type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__") and type(one) is type(other)
        return equal(vars(one), vars(other)) if by_identity else one == other
    return len(items) == len(others) and all(map(equal, items, others))


def lazy(value: Any) -> str | None:
    """Name of a type in a result that may be computed only when it is read, after the clock; None if there is none."""
    if type(value) in (tuple, list, dict) or dataclasses.is_dataclass(type(value)):
        return next((name for item in _items(value) or () if (name := lazy(item))), None)
    eager = value is None or isinstance(value, (int, float, str, np.generic, np.ndarray))
    return None if eager or type(value) in (Tensor, nn.Parameter) else type(value).__name__


def overwrite(old: tuple, new: tuple) -> bool:
    """Write new's contents into old's memory, behind the tensors' version counters.

    Returns False, without writing, if shapes or dtypes differ.
    """
    pairs = list(zip(tensors(old), tensors(new)))
    if len(tensors(old)) != len(tensors(new)) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    for a, b in pairs:
        a.data.copy_(b.data)
    return True


def refuse_flattering_inputs(draws: list[tuple]) -> None:
    """Raises ValueError for inputs that flatter a time: constant ones, and draws that share memory or contents.

    Every floating-point tensor must have more than one value; without any, some tensor must.
    """
    for i, inputs in enumerate(draws):
        result = [x for x in tensors(inputs) if x.numel() > 1]
        floating = [x for x in result if x.is_floating_point()]
        for x in filter(_constant, floating):
            raise ValueError(f"input {i} holds a constant tensor of shape {tuple(x.shape)}: draw random numbers")
        if result and not floating and all(map(_constant, result)):
            raise ValueError(f"input {i} holds only constants: draw random numbers")
        for j, before in enumerate(draws[:i]):
            memory = {x.data_ptr() for x in tensors(before) if x.is_floating_point()}
            for x in floating:
                if x.data_ptr() in memory:
                    raise ValueError(f"inputs {j} and {i} share a tensor of shape {tuple(x.shape)}: draw new ones")
            if equal(inputs, before):
                raise ValueError(f"inputs {j} and {i} are equal: draw new ones")


def _constant(x: Tensor) -> bool:
    with torch.no_grad():
        return bool((x == x.flatten()[0]).all())
