"""Conversion between Hugging Face's config.json and our configurations, by tables that serve both directions."""

import warnings
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fasttfm.config import convert, field_types
from fasttfm.errors import UserError
from fasttfm.store.model_dir import CONFIG_FILE
from fasttfm.system.files import read_json
from fasttfm.system.folders import settled
from fasttfm.system.parsing import REQUIRED, field, shown

_OF_EVERY_MODEL = {
    *("model_type", "vocab_size", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
    # provenance and runtime settings
    *("architectures", "is_encoder_decoder", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *("id2label", "label2id", "_num_labels", "num_labels", "problem_type", "_name_or_path", "name_or_path"),
    *("gradient_checkpointing", "chunk_size_feed_forward", "return_dict", "tokenizer_class", "prefix"),
    *("output_attentions", "output_hidden_states", "output_past", "torchscript", "task_specific_params"),
    *("_attn_implementation_autoset", "cls_token_id", "sep_token_id", "mask_token_id"),
}
"""Fields of config.json that are read elsewhere or do not affect logits."""
_OF_NO_SEARCH = {
    *("pad_token_id", "bos_token_id", "unk_token_id", "transformers_version", "_from_model_config", "use_cache")
}
"""Fields of generation_config.json that do not affect the search."""
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu",
    "swish": "silu",
}  # fmt: skip
"""Their activation -> ours; the usual one of several names comes first."""
THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}


class Field(NamedTuple):
    """A field of one of our configurations."""

    ours: str
    theirs: str
    default: Any = REQUIRED
    """Value if config.json has none."""


def read_config(folder: Path, *kinds: str) -> dict[str, Any]:
    """Read config.json with one of these values of model_type; UserError if it is missing or of another type."""
    path = folder / "config.json"
    settled(folder)
    if (folder / CONFIG_FILE).is_file() and not path.is_file():
        raise UserError(f"{folder}: is a model directory of fasttfm already: commands take it as it is")
    given = read_json(path)
    if field(given, "model_type", str, str(path), None) not in kinds:
        raise UserError(
            f"{path}: model_type is {shown(given.get('model_type'))}, it must be {' or '.join(kinds)}: give another "
            "folder, or import this one as a model of its own type"
        )
    return given


def refuse_others(given: Mapping[str, Any], path: Path, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UserError for a field whose value is not among the allowed ones; None allows a missing field."""
    for name, values in allowed.items():
        if given.get(name) not in values:
            raise UserError(f"{path}: {name} {shown(given[name])} is not supported")


def tell_unknown_fields(given: Mapping[str, Any], path: Path, known: Container[str]) -> None:
    """Warn of fields in config.json that are not read and may affect the model."""
    names = [
        name for name, value in given.items() if name not in _OF_EVERY_MODEL and name not in known and value is not None
    ]
    if names:
        message = f"{path}: the fields {', '.join(sorted(names))} are unknown: they were left out"
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def read_search(folder: Path) -> dict[str, Any]:
    """Read generation_config.json; empty if there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() or path.is_symlink() else {}


def tell_search(folder: Path, given: Mapping[str, Any], read: Container[str]) -> None:
    """Warn of search settings that are not read. given: generation_config.json or an older config.json."""
    left = [f"{name} {shown(value)}" for name, value in given.items()
            if name not in read and name not in _OF_NO_SEARCH and value not in (None, False)]  # fmt: skip
    if left:
        message = f"{folder}: left out its search settings {', '.join(left)}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def our_activation(
    given: Mapping[str, Any], path: Path, name: str, default: str, names: Mapping[str, str] = ACTIVATIONS
) -> Any:
    """Translate the activation in field `name`. names: theirs -> ours. UserError for an unknown one."""
    activation = field(given, name, str, str(path), default)
    if activation not in names:
        raise UserError(f"{path}: {name} {activation} is not supported: {', '.join(names)} are")
    return names[activation]


def configuration(cls: type, given: Mapping[str, Any], path: Path, fields: Iterable[Field], **values: Any) -> Any:
    """Build cls from config.json's fields and further values by our names; UserError for invalid values."""
    kinds = field_types(cls)
    for ours, theirs, default in fields:
        if default is REQUIRED and theirs not in given:
            raise UserError(f"{path}: has no {theirs}: it is truncated; copy it again")
        values[ours] = convert(given.get(theirs, default), kinds[ours], f"{path}: {theirs}")
    try:
        return cls(**{name: convert(value, kinds[name], f"{path}: {name}") for name, value in values.items()})
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def described(config: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return the fields of our configuration by their names."""
    return {theirs: getattr(config, ours) for ours, theirs, _ in fields}
