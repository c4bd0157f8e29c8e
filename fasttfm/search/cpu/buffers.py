"""Rows between the products and loops of a search on a CPU, in memory that is allocated once."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from fasttfm.cpu import step_passes
from fasttfm.cpu.linear import FrozenLinear, kept_with_weights
from fasttfm.cpu.step_passes import array
from fasttfm.models.plain import fused_activation


class Buffer:
    """Values (M, N), and in int8 the quantized rows with their scales."""

    def __init__(self, operand: Tensor, values: Tensor, scales: Any) -> None:
        self.operand, self.values = operand, values
        """Input of the next product, and values."""
        self.scales = scales
        self.arrays = array(values), None if scales is None else operand.numpy(), scales
        """Outputs of a loop: values, quantized rows and scales, None where they are not used."""

    @classmethod
    def new(cls, rows: int, width: int, dtype: torch.dtype, int8: bool) -> "Buffer":
        """Rows of zeros."""
        values = torch.zeros(rows, width, dtype=dtype, device="cpu")
        return cls(values.byte(), values, np.zeros(rows, np.float32)) if int8 else cls(values, values, None)

    def first(self, rows: int) -> "Buffer":
        """The first rows, in the same memory."""
        return Buffer(self.operand[:rows], self.values[:rows], None if self.scales is None else self.scales[:rows])


class AtOnce:
    """Makes calls at once, where Launches records them."""

    def __init__(self) -> None:
        self._team = step_passes.team()

    def add(self, loop: Any, *args: Any) -> None:
        """Call loop(team, *args)."""
        loop(self._team, *args)

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function."""
        function()


def hidden_of(layer: Any) -> tuple[FrozenLinear, int | None]:
    """The first product of a layer's feed-forward network, and the number of its activation if another loop applies
    it."""
    number = step_passes.loops().ACTIVATIONS.get(fused_activation(layer.activation))
    return FrozenLinear(layer.linear1.weight, layer.linear1.bias, relu=number is None), number


Norm = tuple[Any, Any, float]


def norm_arrays(norm: nn.LayerNorm) -> Norm:
    """Weight and bias (d,) as arrays, and eps."""
    return array(norm.weight), array(norm.bias), norm.eps


def norms_of(stack: Any) -> list[nn.LayerNorm]:
    """All norms of a stack, in parameter order."""
    names = ("norm1", "norm2", "norm3")
    norms = [getattr(layer, name) for layer in stack.layers for name in names if hasattr(layer, name)]
    return norms if stack.norm is None else [*norms, stack.norm]


def kept_of(model: Any, stack: Any, make: Callable[[Any, list[Norm]], Any]) -> Any:
    """make(stack, arrays of its norms), kept with the model's weights."""
    norms = norms_of(stack)
    # The weight cache of an ensemble is shared by its members; the id is checked against a live reference.
    activations = [fused_activation(each.activation) for each in stack.layers]
    key = make, id(model), stack.layers[0].norm_first, *activations, *[each.eps for each in norms]
    of_model, kept = kept_with_weights(key, lambda: (ref(model), make(stack, [norm_arrays(each) for each in norms])))
    return kept if of_model() is model else make(stack, [norm_arrays(each) for each in norms])
