"""Layers for Hugging Face's `kernels`, which replaces another layer's forward by theirs: no state, no constructor.

    replace_kernel_forward_from_hub(torch.nn.LayerNorm, "LayerNorm")
    register_kernel_mapping({"LayerNorm": {"cuda": LayerRepository("…/fasttfm", layer_name="LayerNorm", version=1)}})
    model = kernelize(model, mode=Mode.TRAINING)

The annotations of a class are the attributes that it reads from the original layer. Each computes the same as the layer
in its docstring, except that dropout uses Philox with a seed drawn from torch's generator.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fasttfm import nn as replacements
from fasttfm.functional import feed_forward, layer_norm, residual_layer_norm

__all__ = [
    "FeedForward",
    "LayerNorm",
    "MultiheadAttention",
    "ResidualLayerNorm",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
]


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm over the last dimension."""

    can_torch_compile = True

    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """input (..., N), in any floating dtype; returns the same shape and dtype."""
        if len(self.normalized_shape) != 1:
            return nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return layer_norm(input, self.weight, self.bias, self.eps)


class ResidualLayerNorm(nn.Module):
    """LayerNorm(dropout(dense(hidden_states)) + input_tensor) in a product and one pass.

    Replaces BertSelfOutput and BertOutput of transformers, and those of RoBERTa, ELECTRA and LayoutLM.
    """

    can_torch_compile = True

    dense: nn.Linear
    dropout: nn.Dropout
    LayerNorm: nn.LayerNorm

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """hidden_states (..., F), input_tensor (..., N); returns (..., N)."""
        norm, p = self.LayerNorm, self.dropout.p if self.training else 0.0
        x = self.dense(hidden_states)
        return residual_layer_norm(x, input_tensor, norm.weight, norm.bias, norm.eps, dropout_p=p)[0]


class FeedForward(nn.Module):
    """linear2(dropout(relu(linear1(x)))) (Vaswani et al. 2017, equation 2)."""

    can_torch_compile = True

    linear1: nn.Linear
    linear2: nn.Linear
    dropout: nn.Dropout

    def forward(self, x: Tensor) -> Tensor:
        """x (..., N); returns (..., N')."""
        first, second, p = self.linear1, self.linear2, self.dropout.p if self.training else 0.0
        return feed_forward(x, first.weight, first.bias, second.weight, second.bias, dropout_p=p)


def _lent(kind: type[nn.Module], original: type[nn.Module]) -> Callable[..., Any]:
    """fasttfm.nn's forward with torch.nn's signature, for an object of torch.nn's class."""

    @functools.wraps(original.forward, assigned=["__doc__"])
    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        return kind.forward(_seen_as(self, kind), *inputs, **options)

    return forward


class MultiheadAttention(nn.Module):
    """torch.nn.MultiheadAttention, except that a query with no key to attend gives zeros instead of NaN."""

    forward = _lent(replacements.MultiheadAttention, nn.MultiheadAttention)


class TransformerEncoderLayer(nn.Module):
    """torch.nn.TransformerEncoderLayer: each residual connection, its dropout and its norm in one pass."""

    forward = _lent(replacements.TransformerEncoderLayer, nn.TransformerEncoderLayer)


class TransformerDecoderLayer(nn.Module):
    """torch.nn.TransformerDecoderLayer: each residual connection, its dropout and its norm in one pass."""

    forward = _lent(replacements.TransformerDecoderLayer, nn.TransformerDecoderLayer)


_CHILDREN: dict[type[nn.Module], tuple[type[nn.Module], type[nn.Module]]] = {
    nn.MultiheadAttention: (replacements.MultiheadAttention, MultiheadAttention),
    nn.LayerNorm: (replacements.LayerNorm, LayerNorm),
}
"""torch.nn's class -> (fasttfm.nn's class, the layer here whose forward it may have)."""


def _seen_as(module: Any, kind: type[nn.Module]) -> Any:
    """A view of module as an object of class kind, with the same for its attentions and norms.

    Children whose forward is neither torch.nn's nor ours are kept and called.
    """
    state = {name: value for name, value in module.__dict__.items() if name != "forward"}
    state["_modules"] = {name: _child(child) for name, child in module._modules.items()}
    seen = object.__new__(kind)
    object.__setattr__(seen, "__dict__", state)
    return seen


def _child(child: Any) -> Any:
    pair = _CHILDREN.get(type(child))
    if pair is None:
        return child
    kind, layer = pair
    forward = child.__dict__.get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not layer.forward:
        return child
    return _seen_as(child, kind)
