"""Conversion between model directories and Hugging Face's BERT, ALBERT and ELECTRA folders, tokenizers included."""

from pathlib import Path
from typing import Any

from fasttfm.convert.exchange import exporting, warnings_as_lines
from fasttfm.errors import UserError
from fasttfm.system.files import read_json
from fasttfm_pretraining.config.data import MaskingConfig
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.interop import bert
from fasttfm_pretraining.interop.bert_relatives import RELATIVES
from fasttfm_pretraining.interop.check import check_part
from fasttfm_pretraining.interop.folders import write_imported
from fasttfm_pretraining.interop.tokenizer_files import read_tokenizer, tell_other_tokens, write_text_tokenizer
from fasttfm_pretraining.models.bert import BertPretraining
from fasttfm_pretraining.models.electra import Electra

_TASK_HEADS = ("ForQuestionAnswering", "ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification")


def import_folder(
    folder: Path, out: Path, generator: Path | None = None, *, check: bool = False
) -> tuple[BertPretraining | Electra, list[str]]:
    """Convert a folder and its tokenizer to a model directory. Returns the model and notes on omissions.

    generator: for ELECTRA, the folder of ElectraForMaskedLM; None: the generator is initialized (fine-tuning does not
    use it). check: compare scores with transformers, if installed. Raises UserError for missing or mismatched files.
    """
    given = read_json(folder / "config.json")
    kind, architectures = given.get("model_type"), given.get("architectures")
    if generator is not None and kind != "electra":
        raise UserError(f"--generator belongs to an ELECTRA, and {folder} is of type {kind!r}: leave it out")
    with warnings_as_lines() as told:
        model = bert.read_electra(folder, generator) if kind == "electra" else bert.read_pretraining(folder)
        tokenizer = read_tokenizer(folder)
        tell_other_tokens(folder / "config.json", given, tokenizer)
    if check:
        folders = {"": folder, "discriminator": folder, "generator": generator}
        for name, part in bert.parts(model).items():
            told += check_part(part, where) if (where := folders[name]) is not None else []
    if isinstance(architectures, list) and any(str(each).endswith(_TASK_HEADS) for each in architectures):
        told.append(f"{folder}: left out the trained head of {architectures[0]}: fasttfm finetune import keeps it")
    if kind in RELATIVES:
        kind = "bert"
    pairs = {"bert": "mlm+nsp", "albert": "mlm+sop", "electra": "electra"}[kind]
    objective: Any = pairs if kind == "electra" or model.config.sentence_head else "mlm"
    data = MaskingConfig(objective=objective, row_length=min(128, model.config.max_length))
    return model, write_imported(folder, out, kind, model, data, tokenizer, told)


def export_folder(
    model: BertPretraining | Electra, out: Path, tokenizer: TextTokenizer, *, check: bool = False
) -> list[str]:
    """Write a folder for transformers, with the tokenizer; two folders for ELECTRA. Returns lines for the user.

    check: as in import_folder().
    """
    with exporting(out) as (fresh, told):
        for name, part in bert.parts(model).items():  # the same is told of both parts of an ELECTRA
            bert.write_part(part, fresh / name, bert.special_tokens(tokenizer))
            told[:] = write_text_tokenizer(tokenizer, fresh / name, "both")
            told += check_part(part, fresh / name) if check else []
    return told
