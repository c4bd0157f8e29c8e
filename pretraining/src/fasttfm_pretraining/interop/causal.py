"""GPT and Llama between Hugging Face's folders and model directories, with their tokenizers."""

from __future__ import annotations

from pathlib import Path

from fasttfm.files import read_json
from fasttfm.interop.exchange import warnings_as_lines
from fasttfm_pretraining.config.data import DocumentsConfig
from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
from fasttfm_pretraining.interop import gpt, llama
from fasttfm_pretraining.interop.folders import write_imported
from fasttfm_pretraining.interop.tokenizer_files import read_tokenizer
from fasttfm_pretraining.models.gpt import GPT
from fasttfm_pretraining.models.llama import Llama

_LONGEST_ROW = 2048


def import_folder(folder: Path, out: Path) -> list[str]:
    """Make a model directory of a Hugging Face folder; returns what was left out or assumed.

    Raises UserError for what is missing, cut off or of another architecture.
    """
    module = llama if read_json(folder / "config.json").get("model_type") == "llama" else gpt
    with warnings_as_lines() as told:
        model = module.read(folder)
        tokenizer = read_tokenizer(folder)
    length = min(_LONGEST_ROW, model.config.max_length)
    data = DocumentsConfig(row_length=length, max_tokens=max(4096, length))
    return write_imported(folder, out, model.kind, model, data, tokenizer, told)


def export_folder(model: GPT | Llama, out: Path, tokenizer: TextTokenizer) -> list[str]:
    """Write what transformers' AutoModelForCausalLM and AutoTokenizer load; returns lines for the user."""
    return llama.write(model, out, tokenizer) if isinstance(model, Llama) else gpt.write(model, out, tokenizer)
