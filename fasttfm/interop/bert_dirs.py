"""Model directories made of Hugging Face's BERT, ALBERT and ELECTRA folders, with their tokenizer, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasttfm.config.data import MaskingConfig
from fasttfm.data.masking_vocabulary import masking_vocabulary
from fasttfm.data.text_tokenizer import (
    BYTES_FILE,
    PIECES_FILE,
    TOKENIZER_FILE,
    ImportedTokenizer,
    TextTokenizer,
    load_text_tokenizer,
)
from fasttfm.errors import UserError
from fasttfm.files import read_json
from fasttfm.folders import replacing
from fasttfm.interop import bert
from fasttfm.interop.exchange import write_imported
from fasttfm.interop.tokenizer_json import write_tokenizer
from fasttfm.models.bert import BertPretraining
from fasttfm.models.electra import Electra
from fasttfm.parsing import field

_WORD_PIECES = "vocab.txt"


def import_folder(folder: Path, out: Path, generator: Path | None = None) -> BertPretraining | Electra:
    """Make a model directory of a folder, with its tokenizer; returns the model.

    generator: of an ELECTRA, the folder of ElectraForMaskedLM; without it the generator begins with fresh weights,
    which fine-tuning does not need. Raises UserError where something is missing or does not fit.
    """
    kind = read_json(folder / "config.json").get("model_type")
    if generator is not None and kind != "electra":
        raise UserError(f"--generator belongs to an ELECTRA, and {folder} is of type {kind!r}: leave it out")
    model = bert.read_electra(folder, generator) if kind == "electra" else bert.read_pretraining(folder)
    tokenizer = read_tokenizer(folder)
    pairs = {"bert": "mlm+nsp", "albert": "mlm+sop", "electra": "electra"}[kind]
    objective: Any = pairs if kind == "electra" or model.config.sentence_head else "mlm"
    data = MaskingConfig(objective=objective, row_length=min(128, model.config.max_length))
    write_imported(folder, out, kind, model, data, tokenizer)
    return model


def export_folder(model: BertPretraining | Electra, out: Path, tokenizer: TextTokenizer) -> list[str]:
    """Write what transformers loads, with the tokenizer; of an ELECTRA two folders. Returns lines for the user."""
    told: list[str] = []
    vocabulary = masking_vocabulary(tokenizer)
    special: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    special |= {"cls_token_id": vocabulary.begin, "sep_token_id": vocabulary.end, "mask_token_id": vocabulary.mask}
    with replacing(out, "writes a model", "exported model") as fresh:
        for name, part in bert.parts(model).items():
            bert.write_part(part, fresh.path / name, special)
            tokenizer.save(fresh.path / name)
            told = write_tokenizer(tokenizer, fresh.path / name, "both")
    return told


def read_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer.json of a folder, or what export_folder() has left there; else one made of its vocab.txt, whose
    word pieces are lower-cased where tokenizer_config.json does not say otherwise.

    Raises UserError where there is none, or `tokenizers` is not installed.
    """
    if any((folder / name).is_file() for name in (TOKENIZER_FILE, PIECES_FILE, BYTES_FILE)):
        return load_text_tokenizer(folder)
    if not (folder / _WORD_PIECES).is_file():
        raise UserError(
            f"{folder}: has neither {TOKENIZER_FILE} nor {_WORD_PIECES}: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one"
        )
    try:
        from tokenizers import BertWordPieceTokenizer  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise UserError(f"{folder / _WORD_PIECES}: needs the package tokenizers: pip install tokenizers") from None
    says = folder / "tokenizer_config.json"
    lowercase = field(read_json(says), "do_lower_case", bool, str(says), True) if says.is_file() else True
    try:
        made = BertWordPieceTokenizer(str(folder / _WORD_PIECES), lowercase=lowercase)
        return ImportedTokenizer(made.to_str())
    except Exception as error:  # tokenizers raises Exception itself
        raise UserError(f"{folder / _WORD_PIECES}: is damaged or no WordPiece vocabulary ({error})") from None
