"""Model directories for distribution, in the layout of the Hugging Face hub.

    DIR/config.json           model configuration and decoding options
        model.safetensors     weights, named as in Transformer.state_dict()
        spm.model             (or spm.src.model and spm.tgt.model; with *.vocabulary.json if imported)
        README.md             model card with training records

Directories of `fasttfm train` can be read too.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fasttfm.config import Values, build, convert, field_types, gather
from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.data.tokenizer import BOS, EOS, PAD, Tokenizer
from fasttfm.data.tokenizer_files import save_tokenizers
from fasttfm.errors import UserError
from fasttfm.store.checkpoint import MODEL_FILE
from fasttfm.store.model_dir import CONFIG_FILE, DATA_FILE
from fasttfm.store.run_log import read_log
from fasttfm.store.vocabulary import read_checkpoint
from fasttfm.system.files import read_json, read_plain_yaml, unreadable, write_file
from fasttfm.system.folders import VOCABULARY_FILES, reading, replacing, settled

PRETRAINED_FILE = "config.json"
MODEL_TYPE = "fasttfm"
SPECIAL_TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
"""Names of Hugging Face's configurations."""
_SHOWN_VALIDATIONS = 5
_CARD = Path(__file__).with_name("card.md")


def read_values(folder: Path, overrides: Mapping[str, Any] | None = None) -> Values:
    """Read the configuration of a model directory, of `fasttfm train` or save_pretrained(). Raises UserError.

    overrides: values that replace those of the files.
    """
    settled(folder)
    if (folder / CONFIG_FILE).is_file():
        return gather(files=[folder / CONFIG_FILE], overrides=overrides)
    path = folder / PRETRAINED_FILE
    if not path.is_file():
        missing = "is not a directory" if folder.exists() else "does not exist"
        what = "has no config.yaml" if folder.is_dir() else missing
        raise UserError(f"{folder}: {what}: give a model directory that training or import made")
    config = read_json(path)
    if config.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"{path}: is of a model of type {config.get('model_type')!r}: fasttfm import makes a model directory of one"
        )
    decoding = config.get("decoding", {})
    if "vocab_size" not in config or not isinstance(decoding, dict):
        raise UserError(f"{path}: is truncated or was changed: it has no vocab_size or a wrong decoding; copy it again")
    values = Values()
    for section, cls, fields in (("model", TransformerConfig, config), ("decoding", DecodingConfig, decoding)):
        for name, kind in field_types(cls).items():
            if name in fields:
                values[section][name] = convert(fields[name], kind, f"{path}, {name}")
    changed = gather(overrides=overrides)
    for section in values:
        values[section].update(changed[section])
    values.origins.update(changed.origins)
    return values


def read_pretrained(folder: Path, checkpoint: str = "best") -> tuple[TransformerConfig, dict[str, Tensor], Path]:
    """Read configuration, weights and the weights' path from a directory of `fasttfm train` or save_pretrained().

    checkpoint: as in `fasttfm translate`. Raises UserError for a file that is missing, damaged or of another model.
    """
    with reading(folder):
        values = read_values(folder)
        if "vocab_size" not in values["model"]:
            raise UserError(f"{folder}: its configuration is truncated: it has no vocab_size; copy it back")
        config = build(values).model
        return config, *read_checkpoint(folder, checkpoint)


def write_pretrained(
    folder: Path, config: TransformerConfig, weights: Mapping[str, Tensor], decoding: DecodingConfig | None = None,
    **others: Any,
) -> None:  # fmt: skip
    """Write a model directory atomically; decoding: by default that of model_dir; others: options of write_model().

    Raises UserError if the directory holds other files or cannot be written.
    """
    if decoding is None:
        source = others.get("model_dir")
        decoding = DecodingConfig() if source is None else build(read_values(source)).decoding
    with replacing(folder, "writing a model into it", "model") as replacement:
        write_model(replacement.path, config, weights, decoding, **others)


def write_model(
    folder: Path, config: TransformerConfig, weights: Mapping[str, Tensor], decoding: DecodingConfig, *,
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None, model_dir: Path | None = None, origin: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write a model into an existing directory.

    tokenizers: for source and target, the same object if joint; by default those of model_dir are copied. model_dir
    also supplies training records for the model card; origin: lines for its section on where the model comes from.
    """
    write_files(folder, describe(config, decoding), weights)
    if tokenizers is not None:
        save_tokenizers(folder, *tokenizers)
    elif model_dir is not None:
        copy_tokenizers(model_dir, folder)
    write_file(folder / "README.md", model_card(config, model_dir, origin).encode())


def write_files(folder: Path, fields: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors into an existing directory."""
    write_file(folder / PRETRAINED_FILE, (json.dumps(fields, indent=2) + "\n").encode())
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_file(folder / MODEL_FILE, save(tensors, {"format": "pt"}))


def describe(config: TransformerConfig, decoding: DecodingConfig) -> dict[str, Any]:
    """The contents of config.json: model fields, those that Hugging Face requires, and decoding options."""
    standard = DecodingConfig()
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["FasttfmForSeq2SeqLM"],
        "is_encoder_decoder": True,
        **dataclasses.asdict(config),
        "tie_word_embeddings": config.share_embeddings != "none",
        **SPECIAL_TOKENS,
        "pad_token_id": config.pad_id,
        "decoding": {
            name: value
            for name, value in dataclasses.asdict(decoding).items()
            if value != getattr(standard, name) or name in ("beam", "length_penalty", "alpha")
        },
    }


def copy_tokenizers(model_dir: Path, folder: Path) -> None:
    """Copy the tokenizer's files of a model directory."""
    for name in VOCABULARY_FILES:
        source = model_dir / name
        if source.exists():
            try:
                content = source.read_bytes()
            except OSError as error:
                raise unreadable(source, error) from error
            write_file(folder / name, content)


def model_card(config: TransformerConfig, model_dir: Path | None = None, origin: Sequence[str] = ()) -> str:
    """README.md of a model: architecture, usage, origin, and its training records if any."""
    fields = {"order": "pre-norm" if config.norm_first else "post-norm", "tokens": f"{config.vocab_size:,}"}
    lines = [Template(_CARD.read_text(encoding="utf-8")).substitute(dataclasses.asdict(config), **fields)]
    records = [] if model_dir is None else [*_data_lines(model_dir), *_record_lines(model_dir)]
    if origin:
        lines += ["## Origin", "", *(f"- {line}" for line in origin), ""]
    if records:
        lines += ["## Training", "", *records, ""]
    return "\n".join(lines)


def _data_lines(model_dir: Path) -> list[str]:
    try:
        sizes = read_plain_yaml(model_dir / DATA_FILE).get("train")
    except UserError:
        return []
    if not isinstance(sizes, dict) or not all(isinstance(size, int) for size in sizes.values()):
        return []
    return [f"- {key.replace('_', ' ')} of the training data: {size:,}" for key, size in sizes.items() if size]


def _record_lines(model_dir: Path) -> list[str]:
    """A table of the last validations in train.log.jsonl."""
    try:
        records = [record for record in read_log(model_dir) if record["kind"] in ("valid", "final", "average")]
    except OSError:
        records = []
    if not records:
        return []
    table = ["", "| update | validation loss | perplexity | BLEU |", "|---|---|---|---|"]
    for record in records[-_SHOWN_VALIDATIONS:]:
        loss, nll, bleu = (record.get(name) for name in ("loss", "nll", "bleu"))
        perplexity = math.exp(min(nll, 700)) if isinstance(nll, int | float) else None
        numbers = (f"{value:.2f}" if isinstance(value, int | float) else "-" for value in (loss, perplexity, bleu))
        table.append(f"| {record.get('step')} | {' | '.join(numbers)} |")
    return [*table, "", "Validation BLEU is sacreBLEU's, as train.log.jsonl has it."]
