"""Checks that a module can be fused instead of called: exact class, no hooks, no overridden forward, plain parameters.

A parametrized, quantized, sharded or LoRA-wrapped module is of another class; pruning and the old weight_norm are
hooks. Every shortcut around a module call checks here.
"""

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook

from fasttfm.cpu.linear import linear
from fasttfm.functional.feed_forward import ACTIVATIONS
from fasttfm.functional.subclasses import ordinary

LINEAR: frozenset[type] = frozenset({nn.Linear, NonDynamicallyQuantizableLinear})
DROPOUT: frozenset[type] = frozenset({nn.Dropout})
NORM: frozenset[type] = frozenset({nn.LayerNorm})
EMBEDDING: frozenset[type] = frozenset({nn.Embedding})
_ACTIVATIONS: frozenset[type] = frozenset({nn.ReLU, nn.GELU, nn.SiLU})
LAYER = frozenset({"layer"})
"""Layers of models.layers and of fasttfm.nn."""
STACK = frozenset({"stack"})
"""Stacks of models.stack."""
_address, _stride, _bytes = Tensor.data_ptr, Tensor.stride, Tensor.nbytes.__get__  # type: ignore[attr-defined]


def untouched(module: nn.Module, kinds: frozenset[Any]) -> bool:
    """Return whether calling module does exactly what a class in kinds does.

    Our equivalents of these classes name them in `stands_for`, which does not apply to classes derived from ours.
    """
    return _unchanged(module, kinds) and not _has_any_global_hook()


def opens(module: Any, *inputs: Tensor) -> bool:
    """Return whether a linear layer can be replaced by a product with its parameters, for these inputs."""
    return untouched(module, LINEAR) and ordinary(*inputs, module.weight, module.bias)


def apply_linear(module: Any, x: Tensor) -> Tensor:
    """module(x) for a linear layer, x (..., N), without the call if the layer is plain."""
    return linear(x, module.weight, module.bias) if opens(module, x) else module(x)


def hooked(module: nn.Module) -> bool:
    """Return whether calling module does more than its class's forward."""
    return not untouched(module, frozenset({type(module)}))


def _unchanged(module: nn.Module, kinds: frozenset[Any]) -> bool:
    kind = type(module)
    return (kind in kinds or kind.__dict__.get("stands_for") in kinds) and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or getattr(module, "_compiled_call_impl", None) is not None
    )


_PLACES: dict[str, frozenset[Any]] = {
    **dict.fromkeys(("self_attn", "multihead_attn"), frozenset({"attention"})),
    **dict.fromkeys(("linear1", "linear2", "out_proj"), LINEAR),
    **dict.fromkeys(("norm1", "norm2", "norm3"), NORM),
    **dict.fromkeys(("dropout", "dropout1", "dropout2", "dropout3"), DROPOUT),
    "activation": _ACTIVATIONS,
}
"""Allowed classes of a layer's submodules, by name."""


def plain_width(layer: Any) -> int:
    """The width of a plain layer, 0 for any other.

    Plain: exact classes, ordinary parameters of one width, and attentions with one input projection.
    """
    if torch.compiler.is_compiling() or _has_any_global_hook():
        return 0
    width = 0
    queue: list[tuple[Any, frozenset[Any]]] = [(layer, LAYER)]
    for module, allowed in queue:
        if not _unchanged(module, allowed):
            return 0
        if allowed is NORM:
            width = width or module.normalized_shape[-1]
            if module.normalized_shape != (width,):
                return 0
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter or parameter.is_nested:
                return 0
            if allowed is NORM and parameter.shape != (width,):
                return 0
        queue += [(child, _PLACES.get(name, frozenset())) for name, child in module._modules.items()]
    for attention in attentions_of(layer):
        extra_keys = getattr(attention, "bias_k", None) is not None or getattr(attention, "add_zero_attn", False)
        if attention.in_proj_weight is None or extra_keys:
            return 0
    hidden = layer.linear1.weight.shape[0]
    fits = layer.linear1.weight.shape == (hidden, width) and layer.linear2.weight.shape == (width, hidden)
    return width if fits else 0


class Snapshot:
    """State of modules: classes, hooks, attributes, children, parameters and their memory.

    unchanged() takes a few calls, however many modules there are.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules = list(modules)
        names = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        self._hooks = [getattr(each, name) for each in modules for name in names]
        self._tables = [vars(each) for each in modules]
        self._tables += [table[name] for table in self._tables for name in ("_modules", "_parameters")]
        self._held = self._all_held()
        self._parameters = [p for each in modules for p in each._parameters.values() if p is not None]
        self._memory = self._memory_now()

    def unchanged(self) -> bool:
        """Return whether no hook was added and nothing else changed."""
        if any(self._hooks):
            return False
        held = self._all_held()
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return False
        return self._memory_now() == self._memory

    def _all_held(self) -> list[Any]:
        """Classes, attributes, children and parameters."""
        return [*map(type, self._modules), *chain.from_iterable(map(dict.values, self._tables))]

    def _memory_now(self) -> list[Any]:
        return [x for read in (_address, _stride, _bytes) for x in map(read, self._parameters)]


def fused_activation(activation: object) -> str | None:
    """The activation's name in the feed-forward operator, or None if it is not fused."""
    if isinstance(activation, nn.Module) and untouched(activation, _ACTIVATIONS):
        name = type(activation).__name__.lower()
        return "gelu_tanh" if getattr(activation, "approximate", "") == "tanh" else name
    if activation is torch.relu:
        return "relu"
    return next((name for name, function in ACTIVATIONS.items() if function is activation), None)


def children(layer: Any, *names: str) -> list[Any]:
    """The submodules of these names that a layer has."""
    modules = layer._modules  # nn.Module.__getattr__ costs a call each
    return [modules[name] for name in names if name in modules]


def attentions_of(layer: Any) -> list[Any]:
    """Self-attention, and cross-attention in a decoder."""
    return children(layer, "self_attn", "multihead_attn")


def norms_of(layer: Any) -> list[Any]:
    """The norm of each sub-layer."""
    return children(layer, "norm1", "norm2", "norm3")


def norms_behind(layer: Any, after: Any) -> list[Any]:
    """The norm behind each sub-layer: its own, or pre-norm the next one's; after: the norm behind the layer."""
    own = norms_of(layer)
    return [*own[1:], after] if layer.norm_first else own
