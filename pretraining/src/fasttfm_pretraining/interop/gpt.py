"""GPT-2 and GPT-1 as Hugging Face's transformers saves them: config.json and weights, read and written.

https://huggingface.co/docs/transformers/model_doc/gpt2 and openai-gpt. Theirs keep matrices transposed (Conv1D). No
code in the files is run.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fasttfm.convert.config_json import (
    THEIR_ACTIVATIONS,
    Field,
    configuration,
    described,
    our_activation,
    read_config,
    refuse_others,
    tell_unknown_fields,
)
from fasttfm.convert.names import Parameter, TheirWeights, parameters, renamed, theirs
from fasttfm.convert.weight_files import read_tensors
from fasttfm.errors import UserError
from fasttfm.store.weights import model_weights, with_weights
from fasttfm.system.parsing import field
from fasttfm_pretraining.config.gpt import GPTConfig
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.interop.folders import Compare, write_causal
from fasttfm_pretraining.models.gpt import GPT


class _Family(NamedTuple):
    """Parameter names of one of the two."""

    embedding: str
    positions: str
    norm: str
    activation: str
    """Field of config.json."""


_FAMILIES = {
    "gpt2": _Family("wte", "wpe", "ln_f", "activation_function"),
    "openai-gpt": _Family("tokens_embed", "positions_embed", "", "afn"),
}
_LAYER = {
    "self_attn.in_proj": "attn.c_attn",
    "self_attn.out_proj": "attn.c_proj",
    "linear1": "mlp.c_fc",
    "linear2": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
}
_FIRST_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu"}
"""GPT-1's activation -> ours: its "gelu" is the formula with tanh."""
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("d_model", "n_embd"),
    Field("heads", "n_head"),
    Field("layers", "n_layer"),
    Field("dropout", "resid_pdrop", 0.1),
    Field("attention_dropout", "attn_pdrop", 0.1),
    Field("layer_norm_eps", "layer_norm_epsilon", 1e-5),
    Field("max_length", "n_positions"),
)


_OTHER_FIELDS = {
    *("activation_function", "afn", "embd_pdrop", "n_inner", "initializer_range", "reorder_and_upcast_attn"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("n_ctx", "n_special", "predict_special_tokens"),
}
"""Fields that are read elsewhere, or that do not affect the logits."""


def read(folder: Path) -> GPT:
    """Read a folder of GPT2LMHeadModel or OpenAIGPTLMHeadModel, or of a class with more heads, in float32.

    Raises UserError for missing or truncated files, or another architecture.
    """
    path = folder / "config.json"
    given = read_config(folder, *_FAMILIES)
    config, family = _config(given, path), _FAMILIES[given["model_type"]]
    stripped = renamed(read_tensors(folder), lambda name: name.removeprefix("transformer."), folder)
    table = f"{family.embedding}.weight"
    if "lm_head.weight" in stripped:  # tied; a model with two heads is saved with this name of the two
        stripped.setdefault(table, stripped["lm_head.weight"])
    weights = TheirWeights(folder, _transposed(stripped))
    weights.refuse_other_layers("h.", config.layers, "config.json's n_layer")
    model = with_weights(lambda: GPT(config), weights.ours(_parameters(config, family)), folder)
    weights.refuse_other_copies({"lm_head.weight": table})
    weights.tell_rest(r"h\.\d+\.attn\.(masked_)?bias", "position_ids")
    return model.eval()


def write(
    model: GPT, folder: Path, tokenizer: TextTokenizer | None = None, compare: Compare | None = None
) -> list[str]:
    """Write a folder for AutoModelForCausalLM and AutoTokenizer. Returns lines for the user.

    Raises UserError if the folder holds other files or cannot be written.
    """
    config = model.config
    kind = "gpt2" if config.norm_first else "openai-gpt"
    family = _FAMILIES[kind]
    ours = _transposed(theirs(model_weights(model), _parameters(config, family)))
    names = THEIR_ACTIVATIONS if kind == "gpt2" else {ours: theirs for theirs, ours in _FIRST_ACTIVATIONS.items()}
    if config.activation not in names:
        raise UserError(f"activation {config.activation}: Hugging Face's GPT-1 has {', '.join(names)} alone")
    fields = {
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else "OpenAIGPTLMHeadModel"],
        "model_type": kind,
        **described(config, FIELDS),
        family.activation: names[config.activation],
        "embd_pdrop": config.dropout,
        "tie_word_embeddings": True,
    }
    if config.d_ff != 4 * config.d_model:
        if kind != "gpt2":
            raise UserError(f"d_ff {config.d_ff}: Hugging Face's GPT-1 has {4 * config.d_model}, 4 times d_model")
        fields["n_inner"] = config.d_ff
    weights = {f"transformer.{name}": weight for name, weight in ours.items()}
    return write_causal(folder, fields, weights, tokenizer, compare)


def _parameters(config: GPTConfig, family: _Family) -> Iterator[Parameter]:
    yield from parameters({"embedding": family.embedding, "positions": family.positions}, kinds=("weight",))
    for number in range(config.layers):
        yield from parameters(_LAYER, f"decoder.layers.{number}.", f"h.{number}.")
    if family.norm:
        yield from parameters({"decoder.norm": family.norm})


def _transposed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameter names: theirs by ours, and ours by theirs."""
    return {name: each.mT if name.endswith(_TRANSPOSED) and each.dim() > 1 else each for name, each in weights.items()}


def _config(given: Mapping[str, Any], path: Path) -> GPTConfig:
    """Our configuration for Hugging Face's. Raises UserError for unsupported fields."""
    allowed = {
        "add_cross_attention": (None, False),
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "tie_word_embeddings": (None, True),
    }
    refuse_others(given, path, allowed)
    tell_unknown_fields(given, path, {*allowed, *(each.theirs for each in FIELDS), *_OTHER_FIELDS})
    is_first = given["model_type"] == "openai-gpt"
    if is_first:
        activation = our_activation(given, path, "afn", "gelu", _FIRST_ACTIVATIONS)
    else:
        activation = our_activation(given, path, "activation_function", "gelu_new")
    dropouts = [field(given, name, float, str(path), 0.1) for name in ("resid_pdrop", "embd_pdrop")]
    if dropouts[0] != dropouts[1]:
        raise UserError(f"{path}: resid_pdrop {dropouts[0]} and embd_pdrop {dropouts[1]} must be the same")
    d_ff = field(given, "n_inner", int, str(path), 0) or 4 * field(given, "n_embd", int, str(path), 0)
    return configuration(GPTConfig, given, path, FIELDS, d_ff=d_ff, norm_first=not is_first, activation=activation)
