"""A model as a directory that is given away, in the layout that Hugging Face's hub expects.

    DIR/config.json           the model's configuration, and how it decodes
        model.safetensors     weights, under the names of Transformer.state_dict()
        spm.model             (or spm.src.model and spm.tgt.model; a *.vocabulary.json beside an imported one)
        README.md             model card: what the model is, and what its training recorded

A directory that `fasttfm train` made is read as well, of its best checkpoint.
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
"""Under the names of Hugging Face's configurations."""
_SHOWN_VALIDATIONS = 5
_CARD = Path(__file__).with_name("card.md")


def read_values(folder: Path, overrides: Mapping[str, Any] | None = None) -> Values:
    """Read a model's description from its directory, or one of save_pretrained(); UserError where there is none.

    overrides: fields that are to have another value.
    """
    settled(folder)
    if (folder / CONFIG_FILE).is_file():
        return gather(files=[folder / CONFIG_FILE], overrides=overrides)
    path = folder / PRETRAINED_FILE
    if not path.is_file():
        missing = "is not a directory" if folder.exists() else "does not exist"
        what = "has no config.yaml" if folder.is_dir() else missing
        raise UserError(f"{folder}: {what}: give a model directory that training or import made")
    given = read_json(path)
    if given.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"{path}: is of a model of type {given.get('model_type')!r}: fasttfm import makes a model directory of one"
        )
    decoding = given.get("decoding", {})
    if "vocab_size" not in given or not isinstance(decoding, dict):
        raise UserError(f"{path}: is cut off or was changed: it has no vocab_size or a wrong decoding; copy it again")
    values = Values()
    for section, cls, fields in (("model", TransformerConfig, given), ("decoding", DecodingConfig, decoding)):
        for name, kind in field_types(cls).items():
            if name in fields:
                values[section][name] = convert(fields[name], kind, f"{path}, {name}")
    changed = gather(overrides=overrides)
    for section in values:
        values[section].update(changed[section])
    values.origins.update(changed.origins)
    return values


def read_pretrained(folder: Path, checkpoint: str = "best") -> tuple[TransformerConfig, dict[str, Tensor], Path]:
    """Configuration and weights of a model directory or of one of save_pretrained(), and the file they come from.

    checkpoint: as of `fasttfm translate`. Raises UserError naming what is missing, damaged or of another model.
    """
    with reading(folder):
        values = read_values(folder)
        if "vocab_size" not in values["model"]:
            raise UserError(f"{folder}: its configuration is cut off: it has no vocab_size; copy it back")
        config = build(values).model
        return config, *read_checkpoint(folder, checkpoint)


def write_pretrained(
    folder: Path, config: TransformerConfig, weights: Mapping[str, Tensor], decoding: DecodingConfig | None = None,
    **others: Any,
) -> None:  # fmt: skip
    """Write a directory as above, all of it or nothing; others: as write_model() takes them.

    decoding: that of others' model_dir where it is not given. Raises UserError for a directory that holds other files,
    and where nothing can be written.
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

    tokenizers: source's and target's, one object for both where they are one; else those of model_dir are copied, whose
    records the model card repeats. origin: lines of the card on where the model comes from.
    """
    write_files(folder, describe(config, decoding), weights)
    if tokenizers is not None:
        save_tokenizers(folder, *tokenizers)
    elif model_dir is not None:
        copy_tokenizers(model_dir, folder)
    write_file(folder / "README.md", model_card(config, model_dir, origin).encode())


def write_files(folder: Path, fields: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors into a directory that is there."""
    write_file(folder / PRETRAINED_FILE, (json.dumps(fields, indent=2) + "\n").encode())
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_file(folder / MODEL_FILE, save(tensors, {"format": "pt"}))


def describe(config: TransformerConfig, decoding: DecodingConfig) -> dict[str, Any]:
    """config.json: the fields of a model with what Hugging Face asks of every configuration, and how it decodes."""
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
    """README.md of a model: what it is, how it is used, where it comes from, and what the records of its training say,
    where there are."""
    known = {"order": "pre-norm" if config.norm_first else "post-norm", "tokens": f"{config.vocab_size:,}"}
    lines = [Template(_CARD.read_text(encoding="utf-8")).substitute(dataclasses.asdict(config), **known)]
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
    """The last validations of train.log.jsonl as a table."""
    try:
        records = [record for record in read_log(model_dir) if record["kind"] in ("valid", "final", "average")]
    except OSError:
        return []
    if not records:
        return []
    table = ["", "| update | validation loss | perplexity | BLEU |", "|---|---|---|---|"]
    for record in records[-_SHOWN_VALIDATIONS:]:
        loss, nll, bleu = (record.get(name) for name in ("loss", "nll", "bleu"))
        perplexity = math.exp(min(nll, 700)) if isinstance(nll, int | float) else None
        numbers = (f"{value:.2f}" if isinstance(value, int | float) else "-" for value in (loss, perplexity, bleu))
        table.append(f"| {record.get('step')} | {' | '.join(numbers)} |")
    return [*table, "", "Validation BLEU is sacreBLEU's, as train.log.jsonl has it."]
