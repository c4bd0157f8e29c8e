"""Checks that make a time worth printing: right numbers from inputs that do not flatter.

Error is the largest difference from the float64 result over that result's largest magnitude, tensor by tensor, the
worst of them. It may be twice that of plain PyTorch in the same dtype plus a floor, the rule of flash-attention's
tests; plain PyTorch itself must stay within half the dtype's digits. The floor is two units in the last place in half
precision, whose results are rounded from float32, and 32 in float32, where sums differ by their order alone.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_FLOOR = {"float32": 32, "float16": 2, "bfloat16": 2}
"""Units in the last place that are allowed beside twice the plain error, as in tests/gpu/test_kernels.py."""
_KINKED = 0.01
KINKED_MEASURE = "|x - float64| / max |float64| of 99 in 100"
"""Definition of kinked_error(), for the record."""


def _items(value: Any) -> list[Any] | None:
    """Return what a tuple, list, mapping or dataclass holds, in order; None for anything else."""
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [x for item in _items(value) or () for x in tensors(item)]


def _mapped(value: Any, change: Any) -> Any:
    """value with change(tensor) in the place of every tensor."""
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
    """The inputs with every floating-point tensor in float64, asking for gradients where they did."""

    def double(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x

    return _mapped(inputs, double)


def copied(inputs: tuple) -> tuple:
    """The inputs in memory of their own."""
    return _mapped(inputs, lambda x: x.detach().clone().requires_grad_(x.requires_grad))


_cotangents: dict[tuple, Tensor] = {}


def cotangent(output: Tensor) -> Tensor:
    """The gradient that reaches an output: 1 for a loss, else the same random numbers, in each provider's layout."""
    if output.dim() == 0:
        return torch.ones_like(output)
    key = (tuple(output.shape), output.stride(), output.dtype, output.device)
    if key not in _cotangents:
        if len(_cotangents) > 64 or sum(c.nbytes for c in _cotangents.values()) > 2**31:
            _cotangents.clear()
        # numbers that every dtype holds exactly, so that the reference sees the same
        values = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
        _cotangents[key] = torch.empty_like(output).copy_(values).detach()
    return _cotangents[key]


def relative_error(result: Any, expected: Any) -> float:
    """The worst tensor's largest difference over the reference's largest magnitude; infinite where shapes differ."""
    return _worst(result, expected, lambda difference: float(difference.max()))


def kinked_error(result: Any, expected: Any) -> float:
    """relative_error of all but a hundredth of the elements, which may be off by a tenth.

    For gradients through a ReLU: at its kink a last digit decides whether a unit passes its gradient, and either is
    right, so that now and then a whole row differs from the reference.
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
    """The largest error that is right in this dtype; plain: that of plain PyTorch, None for that one itself."""
    eps = 2.0**-7 if dtype == "int8" else torch.finfo(getattr(torch, dtype)).eps
    return eps**0.5 if plain is None else 2 * plain + _FLOOR[dtype] * eps


def equal(one: Any, other: Any) -> bool:
    """Return whether two of one kind hold the same in the same places: tensors, arrays, and what holds them."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    items = _items(one)
    return one == other if items is None else all(map(equal, items, _items(other) or ()))


def unread(value: Any) -> str | None:
    """The type in an answer that may compute only when it is looked at, after the clock; None where there is none."""
    if isinstance(value, Tensor):
        return None if type(value) in (Tensor, nn.Parameter) else type(value).__name__
    if type(value) in (tuple, list, dict) or dataclasses.is_dataclass(type(value)):
        return next((result for item in _items(value) or () if (result := unread(item))), None)
    finished = value is None or isinstance(value, (int, float, str, np.generic, np.ndarray))
    return None if finished else type(value).__name__


def overwrite(old: tuple, new: tuple) -> bool:
    """Writes new's contents into old's memory; False, and nothing is written, where the shapes differ.

    Without a trace in the tensors' version counters, so that nothing but the contents tells.
    """
    pairs = list(zip(tensors(old), tensors(new)))
    if len(tensors(old)) != len(tensors(new)) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    for a, b in pairs:
        a.data.copy_(b.data)
    return True


def refuse_flattering_inputs(draws: list[tuple]) -> None:
    """Raises ValueError for inputs that make a time too good: constant ones, and draws that share memory or contents.

    Every floating-point tensor must have more than one value; where there is none, some tensor must. A bias of a
    normalization or a mask of a kind that does not change may be shared, the work's main inputs may not.
    """
    for i, inputs in enumerate(draws):
        result = [x for x in tensors(inputs) if x.numel() > 1]
        floating = [x for x in result if x.is_floating_point()]
        for x in filter(_constant, floating):
            raise ValueError(f"input {i} holds a constant tensor of shape {tuple(x.shape)}: draw random numbers")
        if result and not floating and all(map(_constant, result)):
            raise ValueError(f"input {i} holds nothing but constants: draw random numbers")
        for j, before in enumerate(draws[:i]):
            memory = {x.data_ptr() for x in tensors(before) if x.is_floating_point()}
            for x in floating:
                if x.data_ptr() in memory:
                    raise ValueError(f"inputs {j} and {i} share a tensor of shape {tuple(x.shape)}: draw each anew")
            if equal(inputs, before):
                raise ValueError(f"inputs {j} and {i} hold the same: draw each anew")


def _constant(x: Tensor) -> bool:
    with torch.no_grad():
        return bool((x == x.flatten()[0]).all())
