"""Model directories made of Hugging Face's BERT, ALBERT and ELECTRA folders, with their tokenizer, and back."""

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
    """Make a model directory of a folder, with its tokenizer; returns the model, and what was left out or assumed.

    generator: of an ELECTRA, the folder of ElectraForMaskedLM; without it the generator begins with fresh weights,
    which fine-tuning does not need. check: whether transformers, where it is installed, must score as the model does.
    Raises UserError where something is missing or does not fit.
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
    """Write what transformers loads, with the tokenizer; of an ELECTRA two folders. Returns lines for the user.

    check: as of import_folder().
    """
    with exporting(out) as (fresh, told):
        for name, part in bert.parts(model).items():  # the same is told of both parts of an ELECTRA
            bert.write_part(part, fresh / name, bert.special_tokens(tokenizer))
            told[:] = write_text_tokenizer(tokenizer, fresh / name, "both")
            told += check_part(part, fresh / name) if check else []
    return told
