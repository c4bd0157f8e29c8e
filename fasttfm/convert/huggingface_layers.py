"""Layers of Hugging Face transformers with fused residual connections, norms and feed-forward networks.

Each class derives from the one it replaces and adds no state, so replacing only assigns __class__. Residual connection,
dropout and LayerNorm are one pass; the feed-forward network is one operator if its activation is ReLU or GELU.
Submodules that were replaced, wrapped or hooked are called as before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, GELUActivation, NewGELUActivation
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer
from transformers.models.bert.modeling_bert import BertIntermediate, BertLayer, BertOutput, BertSelfOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.marian.modeling_marian import MarianDecoderLayer, MarianEncoderLayer
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense, T5LayerNorm
from transformers.pytorch_utils import Conv1D

from fasttfm import functional as F
from fasttfm.functional.dropout import Dropout
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.plain import DROPOUT, LINEAR, fused_activation, untouched
from fasttfm.models.residual import SubLayer, add_and_normalise, dropout_of, through

_CONV1D: frozenset[type] = frozenset({Conv1D})
_ACTIVATIONS: dict[type[nn.Module], str] = {
    GELUActivation: "gelu",
    NewGELUActivation: "gelu_tanh",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}


def _activation_name(activation: Any) -> str | None:
    """Return the feed-forward operator's name of an activation; None if it does not support it."""
    if type(activation) in _ACTIVATIONS:
        return _ACTIVATIONS[type(activation)] if untouched(activation, frozenset(_ACTIVATIONS)) else None
    return fused_activation(activation)


def _network(
    x: Tensor, first: Any, activation: Any, second: Any, dropout_p: float = 0.0, kinds: frozenset[Any] = LINEAR
) -> Tensor | None:
    """Compute second(dropout(activation(first(x)))) in one operator; None if the operator cannot."""
    plain = (
        untouched(first, kinds)
        and untouched(second, kinds)
        and ordinary(x, first.weight, first.bias, second.weight, second.bias)
        and first.weight.dtype == second.weight.dtype
    )
    name = _activation_name(activation) if plain else None
    if name is None:
        return None
    inner, outer = first.weight, second.weight
    if kinds is _CONV1D:  # weights are (in, out)
        inner, outer = inner.t(), outer.t()
    return F.feed_forward(x, inner, first.bias, outer, second.bias, dropout_p=dropout_p, activation=name)


class _Bart:
    """Base of BART's and Marian's layers: post-norm, with submodules of the transformers class mixed in."""

    def _through(self: Any, x: Tensor, *attentions: tuple[Any, nn.Module, dict[str, Any]]) -> Tensor:
        """Apply attention sublayers (attention, norm, keyword arguments) and the network to x (B, L, E)."""
        dropout = Dropout(self.dropout if self.training else 0.0)

        def call(attention: Any, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
            return lambda y: attention(y, **options)[0]

        sublayers = [SubLayer(call(attention, options), norm, dropout) for attention, norm, options in attentions]
        return through(x, [*sublayers, SubLayer(self._feed_forward, self.final_layer_norm, dropout)], norm_first=False)

    def _feed_forward(self: Any, x: Tensor) -> Tensor:
        p = self.activation_dropout if self.training else 0.0
        y = _network(x, self.fc1, self.activation_fn, self.fc2, p)
        return self.fc2(nn.functional.dropout(self.activation_fn(self.fc1(x)), p=p)) if y is None else y


class _Encoder(_Bart):
    def forward(self: Any, hidden_states: Tensor, attention_mask: Tensor, **options: Any) -> Tensor:
        """hidden_states (B, S, E) to the same shape."""
        options["attention_mask"] = attention_mask
        x = self._through(hidden_states, (self.self_attn, self.self_attn_layer_norm, options))
        if x.dtype == torch.float16 and not torch.isfinite(x).all():  # as in transformers
            limit = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-limit, limit)
        return x


class _Decoder(_Bart):
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = True,
        **options: Any,
    ) -> Tensor:
        """hidden_states (B, L, E) to the same shape; encoder_hidden_states (B, S, E); options: for the attentions."""
        own = {"attention_mask": attention_mask, **options}
        cross = {"key_value_states": encoder_hidden_states, "attention_mask": encoder_attention_mask, **options}
        attentions = [(self.self_attn, self.self_attn_layer_norm, own)]
        if encoder_hidden_states is not None:
            attentions.append((self.encoder_attn, self.encoder_attn_layer_norm, cross))
        return self._through(hidden_states, *attentions)


class FusedBartEncoderLayer(_Encoder, BartEncoderLayer):
    """BartEncoderLayer on fasttfm's operators."""


class FusedBartDecoderLayer(_Decoder, BartDecoderLayer):
    """BartDecoderLayer on fasttfm's operators."""


class FusedMarianEncoderLayer(_Encoder, MarianEncoderLayer):
    """MarianEncoderLayer on fasttfm's operators."""


class FusedMarianDecoderLayer(_Decoder, MarianDecoderLayer):
    """MarianDecoderLayer on fasttfm's operators."""


class _Bert:
    """Output part of BERT's two sublayers: dense, dropout, and LayerNorm of the sum with the residual."""

    def forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """hidden_states (B, S, F) and the residual input_tensor (B, S, E) to (B, S, E)."""
        return self.joined(self.dense(hidden_states), input_tensor)

    def joined(self: Any, output: Tensor, residual: Tensor) -> Tensor:
        return add_and_normalise(output, residual, self.LayerNorm, dropout_of(self.dropout))[0]


class FusedBertSelfOutput(_Bert, BertSelfOutput):
    """BertSelfOutput with residual, dropout and LayerNorm in one pass."""


class FusedBertOutput(_Bert, BertOutput):
    """BertOutput with residual, dropout and LayerNorm in one pass."""


class FusedBertLayer(BertLayer):
    """BertLayer whose feed-forward network is one operator if its activation is ReLU or GELU."""

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """attention_output (B, S, E) to the same shape."""
        inside: Any = self.intermediate
        output: Any = self.output
        whole = untouched(inside, frozenset({BertIntermediate})) and untouched(output, frozenset({FusedBertOutput}))
        y = _network(attention_output, inside.dense, inside.intermediate_act_fn, output.dense) if whole else None
        return super().feed_forward_chunk(attention_output) if y is None else output.joined(y, attention_output)


class FusedGPT2MLP(GPT2MLP):
    """GPT-2's feed-forward network in one operator."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (..., E) to the same shape."""
        y = _network(hidden_states, self.c_fc, self.act, self.c_proj, kinds=_CONV1D)
        return super().forward(hidden_states) if y is None else self.dropout(y)


class FusedT5DenseActDense(T5DenseActDense):
    """T5's feed-forward network with ReLU or GELU, in one operator."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (..., d_model) to the same shape."""
        y = None
        if untouched(self.dropout, DROPOUT):
            y = _network(hidden_states, self.wi, self.act, self.wo, self.dropout.p if self.training else 0.0)
        return super().forward(hidden_states) if y is None else y


class _OneDtypeRMSNorm:
    """RMSNorm on our kernel if input and weight have one dtype; transformers promotes mixed dtypes."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (..., N) to the same shape."""
        if ordinary(hidden_states, self.weight) and hidden_states.dtype == self.weight.dtype:
            return F.rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return super().forward(hidden_states)  # type: ignore[misc]


class FusedRMSNorm(_OneDtypeRMSNorm, LlamaRMSNorm):
    """Llama's RMSNorm, copied under other names to many modeling files."""


class FusedT5LayerNorm(_OneDtypeRMSNorm, T5LayerNorm):
    """T5's RMSNorm, copied under other names to many modeling files."""


def fused_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that replaces module's; None if there is none.

    transformers copies its RMSNorm under other names to about a hundred modeling files: classes whose forward has the
    same bytecode are replaced too.
    """
    kind = type(module)
    if kind in FUSED:
        return FUSED[kind]
    if not isinstance(getattr(module, "weight", None), Tensor) or "forward" in module.__dict__:
        return None
    copied = ((LlamaRMSNorm, FusedRMSNorm), (T5LayerNorm, FusedT5LayerNorm))
    return next((fused for origin, fused in copied if _code(kind) == _code(origin)), None)


def _code(kind: type[nn.Module]) -> tuple | None:
    """Return forward's bytecode, names and constants without docstring; None if it is not a plain Python function."""
    code = getattr(kind.forward, "__code__", None)
    if code is None or code.co_freevars:
        return None
    texts = {kind.forward.__doc__}
    return code.co_code, code.co_names, code.co_varnames, tuple(c for c in code.co_consts if c not in texts)


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    fused.__bases__[-1]: fused
    for fused in (
        *(FusedBartEncoderLayer, FusedBartDecoderLayer, FusedMarianEncoderLayer, FusedMarianDecoderLayer),
        *(FusedBertSelfOutput, FusedBertOutput, FusedBertLayer, FusedGPT2MLP, FusedT5DenseActDense),
    )
}
"""transformers' class -> its replacement."""


def why_left(module: nn.Module) -> str:
    """Return why a module of transformers is not replaced; '' if it is, or if no replacement exists."""
    if type(module) is T5DenseGatedActDense:
        return "a gated network: the product of two, not one"
    if type(module) in (GPT2MLP, T5DenseActDense) and not _activation_name(module.act):
        return "its activation is not ReLU, GELU or SiLU"
    return ""


def note(module: nn.Module) -> str:
    """Return which part of a replaced module is not fused; '' if all of it is."""
    activation = getattr(module, "activation_fn", None)
    if isinstance(module, BertLayer):
        activation = module.intermediate.intermediate_act_fn
    other = activation is not None and not _activation_name(activation)
    return "its activation is not ReLU, GELU or SiLU: that network is called as before" if other else ""
