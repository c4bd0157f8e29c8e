"""Layers of Hugging Face transformers whose residual connections and feed-forward networks run on fasttfm's operators.

Each class is derived from the one that it stands for and adds no state, so that an object is given its other class.
Residual connection, dropout and LayerNorm are one pass; the feed-forward network is one operator where its activation
is ReLU or GELU. What has been exchanged, wrapped or hooked is called instead.
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
_GELU: dict[type[nn.Module], str] = {
    GELUActivation: "gelu",
    NewGELUActivation: "gelu_tanh",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}


def _name(activation: Any) -> str | None:
    """The name of an activation in the feed-forward operator; None where it has none such."""
    if type(activation) in _GELU:
        return _GELU[type(activation)] if untouched(activation, frozenset(_GELU)) else None
    return fused_activation(activation)


def _network(
    x: Tensor, first: Any, activation: Any, second: Any, dropout_p: float = 0.0, kinds: frozenset[Any] = LINEAR
) -> Tensor | None:
    """second(dropout(activation(first(x)))) in one operator; None where that is not what the operator computes."""
    plain = (
        untouched(first, kinds)
        and untouched(second, kinds)
        and ordinary(x, first.weight, first.bias, second.weight, second.bias)
        and first.weight.dtype == second.weight.dtype
    )
    name = _name(activation) if plain else None
    if name is None:
        return None
    inner, outer = first.weight, second.weight
    if kinds is _CONV1D:  # which keeps them (in, out)
        inner, outer = inner.t(), outer.t()
    return F.feed_forward(x, inner, first.bias, outer, second.bias, dropout_p=dropout_p, activation=name)


class _Bart:
    """Base of BART's and Marian's layers: post-norm, one feed-forward network in the layer itself.

    Its sub-modules are those of the class that stands beside it among the bases.
    """

    def _through(self: Any, x: Tensor, *attentions: tuple[Any, nn.Module, dict[str, Any]]) -> Tensor:
        """x (B, L, E) to the same; of each attention its norm and arguments, besides what it reads."""
        dropout = Dropout(self.dropout if self.training else 0.0)

        def attends(attention: Any, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
            return lambda y: attention(y, **options)[0]

        sublayers = [SubLayer(attends(attention, options), norm, dropout) for attention, norm, options in attentions]
        return through(x, [*sublayers, SubLayer(self._feed_forward, self.final_layer_norm, dropout)], norm_first=False)

    def _feed_forward(self: Any, x: Tensor) -> Tensor:
        p = self.activation_dropout if self.training else 0.0
        y = _network(x, self.fc1, self.activation_fn, self.fc2, p)
        return self.fc2(nn.functional.dropout(self.activation_fn(self.fc1(x)), p=p)) if y is None else y


class _Encoder(_Bart):
    def forward(self: Any, hidden_states: Tensor, attention_mask: Tensor, **options: Any) -> Tensor:
        """hidden_states (B, S, E) to the same shape."""
        given = {"attention_mask": attention_mask, **options}
        x = self._through(hidden_states, (self.self_attn, self.self_attn_layer_norm, given))
        if x.dtype == torch.float16 and not torch.isfinite(x).all():  # as transformers does
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
        """hidden_states (B, L, E) to the same shape; encoder_hidden_states (B, S, E); options: the attention's, such
        as its cache."""
        own = {"attention_mask": attention_mask, **options}
        cross = {"key_value_states": encoder_hidden_states, "attention_mask": encoder_attention_mask, **options}
        attentions = [(self.self_attn, self.self_attn_layer_norm, own)]
        if encoder_hidden_states is not None:
            attentions.append((self.encoder_attn, self.encoder_attn_layer_norm, cross))
        return self._through(hidden_states, *attentions)


class FusedBartEncoderLayer(_Encoder, BartEncoderLayer):
    """BartEncoderLayer on fasttfm's operators."""


class FusedBartDecoderLayer(_Decoder, BartDecoderLayer):  # names of the cache
    """BartDecoderLayer on fasttfm's operators."""


class FusedMarianEncoderLayer(_Encoder, MarianEncoderLayer):
    """MarianEncoderLayer on fasttfm's operators."""


class FusedMarianDecoderLayer(_Decoder, MarianDecoderLayer):  # names of the cache
    """MarianDecoderLayer on fasttfm's operators."""


class _Bert:
    """dense, dropout, and the LayerNorm of the sum: the end of BERT's two sub-layers."""

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
    """BertLayer whose feed-forward network is one operator where its activation is ReLU or GELU."""

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
    """An RMSNorm on our kernel where input and weight are of one dtype: of two, transformers makes a third."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (..., N) to the same shape."""
        if ordinary(hidden_states, self.weight) and hidden_states.dtype == self.weight.dtype:
            return F.rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return super().forward(hidden_states)  # type: ignore[misc]


class FusedRMSNorm(_OneDtypeRMSNorm, LlamaRMSNorm):
    """Llama's RMSNorm, and that of every model whose modeling file repeats it."""


class FusedT5LayerNorm(_OneDtypeRMSNorm, T5LayerNorm):
    """T5's RMSNorm, and that of every model whose modeling file repeats it."""


_REPEATED: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (LlamaRMSNorm, FusedRMSNorm),
    (T5LayerNorm, FusedT5LayerNorm),
)


def fused_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that replaces module's; None where it stays.

    transformers repeats an RMSNorm under another name in each of some hundred modeling files; the same compiled forward
    is the same norm.
    """
    kind = type(module)
    if kind in FUSED:
        return FUSED[kind]
    if not isinstance(getattr(module, "weight", None), Tensor) or "forward" in module.__dict__:
        return None
    return next((fused for origin, fused in _REPEATED if _code(kind) == _code(origin)), None)


def _code(kind: type[nn.Module]) -> tuple | None:
    """Return what forward does and with which names and constants; None of what is not written in Python."""
    code = getattr(kind.forward, "__code__", None)
    if code is None or code.co_freevars:
        return None
    texts = {kind.forward.__doc__}
    return code.co_code, code.co_names, code.co_varnames, tuple(c for c in code.co_consts if c not in texts)


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    BartEncoderLayer: FusedBartEncoderLayer,
    BartDecoderLayer: FusedBartDecoderLayer,
    MarianEncoderLayer: FusedMarianEncoderLayer,
    MarianDecoderLayer: FusedMarianDecoderLayer,
    BertSelfOutput: FusedBertSelfOutput,
    BertOutput: FusedBertOutput,
    BertLayer: FusedBertLayer,
    GPT2MLP: FusedGPT2MLP,
    T5DenseActDense: FusedT5DenseActDense,
}
"""Replacements by class."""


def why_left(module: nn.Module) -> str:
    """Say why a module of transformers stays as it is; '' for one that is exchanged or that nothing here is for."""
    if type(module) is T5DenseGatedActDense:
        return "a gated network: the product of two, not one"
    if type(module) in (GPT2MLP, T5DenseActDense) and not _name(module.act):
        return "its activation is neither ReLU nor GELU"
    return ""


def note(module: nn.Module) -> str:
    """Say which part of an exchanged module stays as it is; '' where none does."""
    activation = getattr(module, "activation_fn", None)
    if isinstance(module, BertLayer):
        activation = module.intermediate.intermediate_act_fn
    other = activation is not None and not _name(activation)
    return "its activation is neither ReLU nor GELU: that network is called as before" if other else ""
