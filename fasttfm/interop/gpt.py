"""GPT-2 and GPT-1 as Hugging Face's transformers saves them: config.json and weights, read and written.

https://huggingface.co/docs/transformers/model_doc/gpt2 and openai-gpt. Theirs keep matrices transposed (Conv1D). No
code in the files is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save
from torch import Tensor

from fasttfm.checkpoints.checkpoint import MODEL_FILE
from fasttfm.checkpoints.model_dir import CONFIG_FILE
from fasttfm.checkpoints.saved import write_run
from fasttfm.checkpoints.weights import load_weights, model_weights
from fasttfm.config import RunConfig
from fasttfm.config.documents import DocumentsConfig
from fasttfm.config.gpt import GPTConfig
from fasttfm.config.training import TrainingConfig
from fasttfm.data.text_tokenizer import TOKENIZER_FILE, ImportedTokenizer, TextTokenizer, load_tokenizer_file
from fasttfm.errors import UserError
from fasttfm.files import read_json, write_file
from fasttfm.folders import replacing
from fasttfm.interop.exchange import read_tensors
from fasttfm.models.gpt import GPT

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


class _Family(NamedTuple):
    """What one of the two calls its parts."""

    embedding: str
    positions: str
    norm: str
    activation: str
    """The field of config.json."""


_FAMILIES = {
    "gpt2": _Family("wte", "wpe", "ln_f", "activation_function"),
    "openai-gpt": _Family("tokens_embed", "positions_embed", "", "afn"),
}
_LAYER = {
    "self_attn.in_proj_": "attn.c_attn.",
    "self_attn.out_proj.": "attn.c_proj.",
    "linear1.": "mlp.c_fc.",
    "linear2.": "mlp.c_proj.",
    "norm1.": "ln_1.",
    "norm2.": "ln_2.",
}


def read(folder: Path) -> GPT:
    """The model of a folder of GPT2LMHeadModel or OpenAIGPTLMHeadModel, or of one with more heads, in float32.

    Raises UserError for what is missing, cut off or of another architecture.
    """
    path = folder / "config.json"
    if (folder / CONFIG_FILE).is_file() and not path.is_file():
        raise UserError(f"{folder}: is a model directory of fasttfm already: fasttfm lm takes it as it is")
    given = read_json(path)
    kind = given.get("model_type")
    if kind not in _FAMILIES:
        raise UserError(f"{path}: is of a model of type {kind!r}: {' and '.join(_FAMILIES)} can be read")
    config, family = _config(given, path), _FAMILIES[kind]
    theirs = {name.removeprefix("transformer."): each for name, each in read_tensors(folder).items()}
    if "lm_head.weight" in theirs:  # tied; a model with two heads is saved with this name of the two
        theirs.setdefault(f"{family.embedding}.weight", theirs["lm_head.weight"])
    model = GPT(config)
    weights = {}
    for ours, name, is_transposed in _names(config, family):
        if name not in theirs:
            raise UserError(f"{folder}: has no {name}: it is cut off, or of another model; copy it anew")
        weights[ours] = theirs[name].float().t() if is_transposed else theirs[name].float()
    load_weights(model, weights, folder)
    return model.eval()


def write(model: GPT, folder: Path, tokenizer: TextTokenizer | None = None) -> None:
    """Write what transformers' AutoModelForCausalLM loads, and a tokenizer.json where the tokenizer is one.

    Raises UserError where the folder holds other files, or nothing can be written.
    """
    config = model.config
    kind = "gpt2" if config.norm_first else "openai-gpt"
    family, weights = _FAMILIES[kind], model_weights(model)
    tensors = {
        f"transformer.{name}": (weights[ours].detach().t() if is_transposed else weights[ours].detach()).contiguous()
        for ours, name, is_transposed in _names(config, family)
    }
    activations = {ours: theirs for theirs, ours in reversed(list(_ACTIVATIONS.items()))}
    if kind == "openai-gpt":  # whose "gelu" is the formula with tanh
        activations["gelu_tanh"] = "gelu"
    end = None if tokenizer is None else tokenizer.end
    described = {
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else "OpenAIGPTLMHeadModel"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "n_positions": config.max_length,
        "n_embd": config.d_model,
        "n_layer": config.layers,
        "n_head": config.heads,
        family.activation: activations[config.activation],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "layer_norm_epsilon": config.layer_norm_eps,
        "bos_token_id": end,
        "eos_token_id": end,
        "tie_word_embeddings": True,
    }
    if config.d_ff != 4 * config.d_model:
        if kind != "gpt2":
            raise UserError(f"d_ff {config.d_ff}: Hugging Face's GPT-1 has {4 * config.d_model}, 4 times d_model")
        described["n_inner"] = config.d_ff
    with replacing(folder, "writes a model") as fresh:
        write_file(fresh.path / "config.json", (json.dumps(described, indent=2) + "\n").encode())
        write_file(fresh.path / MODEL_FILE, save(tensors, {"format": "pt"}))
        if isinstance(tokenizer, ImportedTokenizer):
            tokenizer.save(fresh.path)


def import_folder(folder: Path, out: Path) -> None:
    """Make a model directory of a Hugging Face folder, with its tokenizer.json; UserError where one is missing."""
    model = read(folder)
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{folder}: has no {TOKENIZER_FILE}: AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one"
        )
    tokenizer = load_tokenizer_file(folder / TOKENIZER_FILE)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {len(tokenizer):,} tokens, but its model {model.config.vocab_size:,}"
        )
    config = RunConfig(
        kind="gpt",
        model=model.config,
        data=DocumentsConfig(row_length=model.config.max_length, max_tokens=max(4096, model.config.max_length)),
        training=TrainingConfig(),
    )
    write_run(out, config, model_weights(model), tokenizer)


def _plain(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in weights.items()}


def _names(config: GPTConfig, family: _Family) -> list[tuple[str, str, bool]]:
    """Of each parameter our name, theirs, and whether theirs is transposed."""
    names = [
        ("embedding.weight", f"{family.embedding}.weight", False),
        ("positions.weight", f"{family.positions}.weight", False),
    ]
    for number in range(config.layers):
        for ours, theirs in _LAYER.items():
            for part in ("weight", "bias"):
                transposed = part == "weight" and not ours.startswith("norm")
                names.append((f"decoder.layers.{number}.{ours}{part}", f"h.{number}.{theirs}{part}", transposed))
    if family.norm:
        names += [(f"decoder.norm.{part}", f"{family.norm}.{part}", False) for part in ("weight", "bias")]
    return names


def _config(given: Mapping[str, Any], path: Path) -> GPTConfig:
    """Our configuration for Hugging Face's; UserError for what we have not."""
    for name, allowed in (
        ("add_cross_attention", (None, False)),
        ("scale_attn_weights", (None, True)),
        ("scale_attn_by_inverse_layer_idx", (None, False)),
        ("tie_word_embeddings", (None, True)),
    ):
        if given.get(name) not in allowed:
            raise UserError(f"{path}: {name} {given[name]} is not supported")
    is_first = given["model_type"] == "openai-gpt"
    activation = given.get("afn" if is_first else "activation_function", "gelu" if is_first else "gelu_new")
    if activation not in _ACTIVATIONS:
        raise UserError(f"{path}: activation {activation} is not supported: {', '.join(_ACTIVATIONS)} are")
    dropouts = [given.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop")]
    if dropouts[0] != dropouts[1]:
        raise UserError(f"{path}: resid_pdrop {dropouts[0]} and embd_pdrop {dropouts[1]} must be the same")
    try:
        return GPTConfig(
            vocab_size=given["vocab_size"],
            d_model=given["n_embd"],
            heads=given["n_head"],
            d_ff=given.get("n_inner") or 4 * given["n_embd"],
            layers=given["n_layer"],
            norm_first=not is_first,
            activation="gelu_tanh" if is_first and activation == "gelu" else _ACTIVATIONS[activation],  # type: ignore[arg-type]
            dropout=dropouts[0],
            attention_dropout=given.get("attn_pdrop", 0.1),
            layer_norm_eps=given.get("layer_norm_epsilon", 1e-5),
            max_length=given["n_positions"],
        )
    except KeyError as error:
        raise UserError(f"{path}: has no {error.args[0]}: it is cut off; copy it anew") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None
