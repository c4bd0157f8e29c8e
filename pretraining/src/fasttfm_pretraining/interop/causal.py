"""Conversion between model directories and Hugging Face's GPT and Llama folders, tokenizers included."""

from functools import partial
from pathlib import Path

from fasttfm.convert.config_json import read_search, tell_search
from fasttfm.convert.exchange import warnings_as_lines
from fasttfm.system.files import read_json
from fasttfm_pretraining.config.data import DocumentsConfig
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.interop import gpt, llama
from fasttfm_pretraining.interop.check import check_language_model
from fasttfm_pretraining.interop.folders import write_imported
from fasttfm_pretraining.interop.tokenizer_files import read_tokenizer, tell_other_tokens
from fasttfm_pretraining.models.gpt import GPT
from fasttfm_pretraining.models.llama import Llama

_LONGEST_ROW = 2048


def import_folder(folder: Path, out: Path, *, check: bool = False) -> list[str]:
    """Convert a Hugging Face folder to a model directory. Returns notes on omissions and assumptions.

    check: compare scores with transformers, if installed.

    Raises UserError for missing or truncated files, or another architecture.
    """
    module = llama if read_json(folder / "config.json").get("model_type") == "llama" else gpt
    with warnings_as_lines() as told:
        model = module.read(folder)
        tokenizer, search = read_tokenizer(folder), read_search(folder)
        for name, given in (("config", read_json(folder / "config.json")), ("generation_config", search)):
            tell_other_tokens(folder / f"{name}.json", given, tokenizer, begins=True)
        tell_search(folder, search, ("eos_token_id",))
    told += check_language_model(model, folder) if check else []
    length = min(_LONGEST_ROW, model.config.max_length)
    data = DocumentsConfig(row_length=length, max_tokens=max(4096, length))
    return write_imported(folder, out, model.kind, model, data, tokenizer, told)


def export_folder(model: GPT | Llama, out: Path, tokenizer: TextTokenizer, *, check: bool = False) -> list[str]:
    """Write a folder for AutoModelForCausalLM and AutoTokenizer. Returns lines for the user.

    check: as in import_folder().
    """
    compare = partial(check_language_model, model) if check else None
    if isinstance(model, Llama):
        return llama.write(model, out, tokenizer, compare)
    return gpt.write(model, out, tokenizer, compare)
