"""Layers whose forward Hugging Face's `kernels` puts in the place of another layer's: no state, no constructor.

    replace_kernel_forward_from_hub(torch.nn.LayerNorm, "LayerNorm")
    register_kernel_mapping({"LayerNorm": {"cuda": LayerRepository("…/fasttfm", layer_name="LayerNorm", version=1)}})
    model = kernelize(model, mode=Mode.TRAINING)

The annotations of a class name what it reads of the layer that takes its forward. Each computes what the layer named in
its docstring does, dropout's generator apart (Philox from one seed drawn from torch's).
"""

from __future__ import annotations

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

    What transformers' BertSelfOutput and BertOutput compute, and their like of RoBERTa, ELECTRA and LayoutLM.
    """

    can_torch_compile = True

    dense: nn.Linear
    dropout: nn.Dropout
    LayerNorm: nn.LayerNorm

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """hidden_states (..., F), input_tensor (..., N); returns (..., N)."""
        norm = self.LayerNorm
        y, _ = residual_layer_norm(
            self.dense(hidden_states),
            input_tensor,
            norm.weight,
            norm.bias,
            norm.eps,
            dropout_p=self.dropout.p if self.training else 0.0,
            post_norm=True,
        )
        return y


class FeedForward(nn.Module):
    """linear2(dropout(relu(linear1(x)))) (Vaswani et al. 2017, equation 2)."""

    can_torch_compile = True

    linear1: nn.Linear
    linear2: nn.Linear
    dropout: nn.Dropout

    def forward(self, x: Tensor) -> Tensor:
        """x (..., N); returns (..., N')."""
        return feed_forward(
            x,
            self.linear1.weight,
            self.linear1.bias,
            self.linear2.weight,
            self.linear2.bias,
            dropout_p=self.dropout.p if self.training else 0.0,
        )


class MultiheadAttention(nn.Module):
    """torch.nn.MultiheadAttention, except that a query with no key to attend gives zeros instead of NaN."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch.nn's: query (L, N, E), or (N, L, E) batch first; returns the output and the weights or None."""
        return replacements.MultiheadAttention.forward(
            _seen_as(self, replacements.MultiheadAttention), query, key, value, key_padding_mask, need_weights,
            attn_mask, average_attn_weights, is_causal,
        )  # fmt: skip


class TransformerEncoderLayer(nn.Module):
    """torch.nn.TransformerEncoderLayer: each residual connection, its dropout and its norm in one pass."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As torch.nn's: src (S, N, E), or (N, S, E) batch first; returns the same shape."""
        layer = _seen_as(self, replacements.TransformerEncoderLayer)
        return replacements.TransformerEncoderLayer.forward(layer, src, src_mask, src_key_padding_mask, is_causal)


class TransformerDecoderLayer(nn.Module):
    """torch.nn.TransformerDecoderLayer: each residual connection, its dropout and its norm in one pass."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As torch.nn's: tgt (L, N, E) and memory (S, N, E), or batch first; returns tgt's shape."""
        return replacements.TransformerDecoderLayer.forward(
            _seen_as(self, replacements.TransformerDecoderLayer), tgt, memory, tgt_mask, memory_mask,
            tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal,
        )  # fmt: skip


_CHILDREN: dict[type[nn.Module], tuple[type[nn.Module], type[nn.Module]]] = {
    nn.MultiheadAttention: (replacements.MultiheadAttention, MultiheadAttention),
    nn.LayerNorm: (replacements.LayerNorm, LayerNorm),
}
"""torch.nn's class -> fasttfm.nn's, which takes its state, and the layer that may have lent it its forward."""


def _seen_as(module: Any, kind: type[nn.Module]) -> Any:
    """An object of class kind with the state of module, which stays what it is; its attentions and norms likewise.

    A child whose forward is another than torch.nn's, or ours, stays as it is and is called.
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
