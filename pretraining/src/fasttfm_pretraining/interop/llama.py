"""Llama as Hugging Face's transformers saves it: config.json and weights, read and written.

https://huggingface.co/docs/transformers/model_doc/llama. Rotary positions may be scaled (linear, llama3). Other
scalings (dynamic, yarn, longrope), biases and other types of model are refused by name. No code in the files is run.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fasttfm.convert.config_json import Field, configuration, described, read_config, refuse_others, tell_unknown_fields
from fasttfm.convert.names import Parameter, parameters, theirs
from fasttfm.convert.weight_files import read_tensors
from fasttfm.errors import UserError
from fasttfm.store.weights import model_weights, with_weights
from fasttfm.system.parsing import field
from fasttfm_pretraining.config.llama import LlamaConfig
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.interop.folders import Compare, write_causal
from fasttfm_pretraining.models.llama import Llama

_LAYER = {
    "norm1": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_LLAMA3 = (
    Field("rotary_factor", "factor"),
    Field("rotary_low_turns", "low_freq_factor"),
    Field("rotary_high_turns", "high_freq_factor"),
    Field("rotary_trained_length", "original_max_position_embeddings"),
)
_SCALINGS: dict[str, tuple[Field, ...]] = {"default": (), "linear": _LLAMA3[:1], "llama3": _LLAMA3}
"""Fields of each kind of rotary scaling."""
FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("d_model", "hidden_size"),
    Field("heads", "num_attention_heads"),
    Field("kv_heads", "num_key_value_heads", None),
    Field("head_size", "head_dim", None),
    Field("d_ff", "intermediate_size"),
    Field("layers", "num_hidden_layers"),
    Field("norm_eps", "rms_norm_eps", 1e-6),
    Field("tie_embeddings", "tie_word_embeddings", False),
    Field("init_std", "initializer_range", 0.02),
    Field("max_length", "max_position_embeddings"),
)


def read(folder: Path) -> Llama:
    """Read a folder of LlamaForCausalLM, in float32.

    Raises UserError for missing or truncated files, or another architecture.
    """
    path = folder / "config.json"
    config = _config(read_config(folder, "llama"), path)
    weights = read_tensors(folder)
    weights.refuse_other_layers("model.layers.", config.layers, "config.json's num_hidden_layers")
    model = with_weights(lambda: Llama(config), weights.ours(_parameters(config)), folder)
    if config.tie_embeddings:
        weights.refuse_other_copies({"lm_head.weight": "model.embed_tokens.weight"})
    weights.refuse_rest(r".*rotary_emb\.inv_freq")
    return model.eval()


def write(
    model: Llama, folder: Path, tokenizer: TextTokenizer | None = None, compare: Compare | None = None
) -> list[str]:
    """Write a folder for AutoModelForCausalLM and AutoTokenizer. Returns lines for the user.

    Raises UserError if the folder holds other files or cannot be written.
    """
    config = model.config
    kind = "llama3" if config.rotary_trained_length else "linear" if config.rotary_factor != 1 else "default"
    rotary = {"rope_type": kind, **described(config, _SCALINGS[kind])}
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **described(config, FIELDS),
        "num_key_value_heads": config.groups,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_theta": config.rotary_base, **rotary},
        "rope_scaling": None if kind == "default" else rotary,  # what transformers before version 5 read
    }
    return write_causal(folder, fields, theirs(model_weights(model), _parameters(config)), tokenizer, compare)


def _parameters(config: LlamaConfig) -> Iterator[Parameter]:
    tables = {"embedding": "model.embed_tokens", "decoder.norm": "model.norm"}
    if not config.tie_embeddings:
        tables["output"] = "lm_head"
    yield from parameters(tables, kinds=("weight",))
    for number in range(config.layers):
        yield from parameters(_LAYER, f"decoder.layers.{number}.", f"model.layers.{number}.", kinds=("weight",))


def _config(given: Mapping[str, Any], path: Path) -> LlamaConfig:
    """Our configuration for Hugging Face's. Raises UserError for unsupported fields."""
    allowed = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "pretraining_tp": (None, 1),
        "attention_dropout": (None, 0.0),
    }
    refuse_others(given, path, allowed)
    rotary_names = ("rope_theta", "rope_scaling", "rope_parameters")
    tell_unknown_fields(given, path, {*allowed, *(each.theirs for each in FIELDS), *rotary_names})
    rotary = _rotary(given, path)
    base = field(rotary, "rope_theta", float, str(path), field(given, "rope_theta", float, str(path), 10_000.0))
    scaling = _SCALINGS[rotary["rope_type"]]
    return configuration(LlamaConfig, {**given, **rotary}, path, (*FIELDS, *scaling), rotary_base=base)


def _rotary(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Rotary settings, from rope_parameters or the fields of older files."""
    rotary: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        for key, value in (field(given, name, dict, str(path), None) or {}).items():
            key = "rope_type" if key == "type" else key
            if rotary.setdefault(key, value) != value:
                raise UserError(f"{path}: rope_scaling and rope_parameters have another {key}: they must agree")
    kind = rotary.setdefault("rope_type", "default")
    if kind not in _SCALINGS:
        raise UserError(f"{path}: rope_type {kind!r} is not supported: {', '.join(_SCALINGS)} are")
    if kind == "llama3":
        rotary.setdefault("original_max_position_embeddings", given.get("max_position_embeddings"))
    known = {"rope_type", "rope_theta", *(each.theirs for each in _SCALINGS[kind])}
    if unknown := sorted(name for name, value in rotary.items() if name not in known and value is not None):
        raise UserError(f"{path}: {unknown[0]} {rotary[unknown[0]]} of {kind} rotary positions is not supported")
    return rotary
