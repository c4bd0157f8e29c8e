"""Every importer on a directory with one fault: it is refused by name, reported in a note, or has no effect.

Faults are sampled from all possible ones: a JSON field missing, of another type, absurd or unknown; a weight missing,
extra, of another shape or dtype, or NaN; a file missing, empty, truncated or with other content.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq_models import write as write_fairseq
from model_dirs import contents, write_model_dir
from safetensors.torch import load_file, save_file

from fasttfm.cli.main import main
from fasttfm.convert.ctranslate2_read import _TYPES, _read_variables

from .their_folders import tokenizer_json, write_m2m, write_opus

transformers = pytest.importorskip("transformers")

Weights = dict[str, torch.Tensor]
Fault = tuple[str, Callable[[Path], Any]]
"""Name of the damaged thing, as a message may call it, and the function that damages a directory."""

DRAWN = 12
"""Faults tried per importer."""
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", ".", "the", "cat", "##s", "sat"]
BERT = {
    "vocab_size": len(PIECES), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 20,
}  # fmt: skip
ROBERTA = BERT | {"type_vocab_size": 1, "pad_token_id": 0}
DISTILBERT = {
    "vocab_size": len(PIECES), "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 20,
}  # fmt: skip
GPT = {"vocab_size": 15, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {
    "vocab_size": 15, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "max_position_embeddings": 16,
}  # fmt: skip
CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2LMHeadModel", GPT, "lm"),
    "openai-gpt": ("OpenAIGPTLMHeadModel", GPT, "lm"),
    "llama": ("LlamaForCausalLM", LLAMA, "lm"),
    "bert": ("BertForPreTraining", BERT, "mlm"),
    "albert": ("AlbertForPreTraining", BERT | {"embedding_size": 8}, "mlm"),
    "electra": ("ElectraForPreTraining", BERT | {"embedding_size": 8}, "mlm"),
    "roberta": ("RobertaForMaskedLM", ROBERTA, "mlm"),
    "distilbert": ("DistilBertForMaskedLM", DISTILBERT, "mlm"),
    "squad": ("BertForQuestionAnswering", BERT, "finetune"),
    "classify": ("RobertaForSequenceClassification", ROBERTA, "finetune"),
}
"""Kind -> (class of transformers, sizes, command)."""
BESIDE = ("README.md", "sha256sums")
"""Files of a model directory that may differ between equal imports."""


def write_folder(kind: str, folder: Path) -> None:
    """Write a valid directory."""
    if kind == "ctranslate2":
        pytest.importorskip("ctranslate2")
        model = write_model_dir(folder.parent / "model", trained=False, encoder_layers=1, decoder_layers=1)
        assert main(["export", str(model), "--format", kind, "--no-check", "--out", str(folder)]) == 0
        (folder / "sha256sums").unlink()  # other tools do not write it, and it would reveal every change
        return
    folder.mkdir()
    if kind in CLASSES:
        name, sizes, command = CLASSES[kind]
        cls = getattr(transformers, name)
        torch.manual_seed(0)
        cls(cls.config_class(**sizes)).save_pretrained(folder)
        if command == "lm":
            (folder / "tokenizer.json").write_text(tokenizer_json())
        else:
            (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    else:
        write = {"marian-hf": write_opus, "m2m100": write_m2m, "fairseq": partial(write_fairseq, learned=(8, 8))}[kind]
        write(folder)


def import_words(kind: str, folder: Path, out: Path) -> list[str]:
    """Return the command line that imports the directory."""
    if kind in CLASSES:
        return [CLASSES[kind][2], "import", str(folder), "--no-check", "--out", str(out)]
    given = folder / "checkpoint.pt" if kind == "fairseq" else folder
    words = ["import", str(given), "--format", kind, "--no-check", "--out", str(out)]
    if kind == "fairseq":
        files = (("--dict", "dict.src.txt"), ("--dict", "dict.tgt.txt"), ("--spm", "spm.model"))
        words += [word for flag, name in files for word in (flag, str(folder / name))]
    elif kind == "m2m100":
        words += ["--source-language", "en", "--target-language", "de"]
    return words


def stored(folder: Path) -> tuple[Weights, Callable[[Path, Weights], Any]]:
    """The weights in a directory, and the function that writes others into a copy of it."""
    if (folder / "model.safetensors").exists():
        given = load_file(folder / "model.safetensors")
        return given, lambda to, weights: save_file(weights, to / "model.safetensors", {"format": "pt"})
    if (folder / "checkpoint.pt").exists():
        loaded = torch.load(folder / "checkpoint.pt", weights_only=False)
        return loaded["model"], lambda to, weights: torch.save({**loaded, "model": weights}, to / "checkpoint.pt")
    given = {name: torch.from_numpy(np.array(each)) for name, each in _read_variables(folder / "model.bin").items()}
    return given, lambda to, weights: write_variables(to / "model.bin", weights)


def write_variables(path: Path, variables: Weights) -> None:
    """Write a model.bin, whose format ctranslate2_read describes."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", 6), text("TransformerSpec"), struct.pack("<II", 7, len(variables))]
    for name, variable in variables.items():
        array = variable.numpy()
        kind = next(number for number, dtype in _TYPES.items() if dtype == array.dtype)
        parts += [text(name), struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)]
        parts += [struct.pack("<BI", kind, array.nbytes), array.tobytes()]
    path.write_bytes(b"".join([*parts, struct.pack("<I", 0)]))


# ------------------------------------------------------------------------------------------------------------- faults

WRONG = (None, [], {}, "x", -1, 10**30, 3.5, float("nan"), True)
MAY_BE_MISSING = {"head_dim", "pad_token_id"}
"""Optional fields."""
CONTENTS = (b"", b"{", b"[]", b"\x80\x04\xff\x00" * 9, b'"text"')


def json_faults(folder: Path) -> Iterator[Fault]:
    """Faults of every field of every JSON object."""
    for path in sorted(folder.glob("*.json")):
        given = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or path.name in ("vocab.json", "v.json", "tokenizer.json"):
            continue

        def written(values: Any, file: str = path.name) -> Callable[[Path], Any]:
            return lambda to: (to / file).write_text(json.dumps(values), encoding="utf-8")

        for name, value in given.items():
            if name not in MAY_BE_MISSING:
                yield name, written({key: each for key, each in given.items() if key != name})
            for wrong in wrong_values(name, value):
                yield name, written({**given, name: wrong})
        if path.name == "config.json":
            yield "unheard_of", written({**given, "unheard_of": 3})


def wrong_values(name: str, value: Any) -> Iterator[Any]:
    """Values of another type, and absurd ones of the same type."""
    for wrong in WRONG:
        is_number = isinstance(wrong, int | float) and not isinstance(wrong, bool)
        fits = isinstance(value, float) and is_number and wrong >= 0
        if (wrong is not None or name not in MAY_BE_MISSING) and not fits:
            yield wrong


def spoilt_weights(weights: Weights) -> Iterator[tuple[str, Weights]]:
    """Yield (name of the damaged weight, all weights)."""
    for name, weight in weights.items():
        if not weight.dtype.is_floating_point:
            continue
        yield name, {key: each for key, each in weights.items() if key != name}
        larger = torch.cat([weight, weight[:1]]) if weight.dim() else weight[None].repeat(2)
        yield name, {**weights, name: larger}
        yield name, {**weights, name: weight[None].clone()}
        yield name, {**weights, name: torch.full_like(weight, torch.nan)}
        yield f"{name}.unheard_of", {**weights, f"{name}.unheard_of": weight.clone()}
        yield name, {**weights, name: weight.to(torch.float64 if weight.dtype == torch.float32 else torch.float32)}


def weight_faults(folder: Path) -> Iterator[Fault]:
    whole, write = stored(folder)
    of_ctranslate2 = (folder / "model.bin").exists()
    for name, weights in spoilt_weights(whole):
        if not of_ctranslate2 or all(each.dtype != torch.float64 for each in weights.values()):  # it has no such type
            yield name, partial(write, weights=weights)
    for name, value in whole.items() if of_ctranslate2 else ():
        if not value.dtype.is_floating_point:
            yield name, partial(write, weights=whole | {name: torch.full_like(value, 99)})
    if (folder / "checkpoint.pt").exists():
        loaded = torch.load(folder / "checkpoint.pt", weights_only=False)
        settings = vars(loaded["cfg"]["model"])
        for name, value in settings.items():
            for wrong in filter(lambda each: each is not None, wrong_values(name, value)):
                model = type(loaded["cfg"]["model"])(**settings | {name: wrong})
                spoilt = {**loaded, "cfg": {**loaded["cfg"], "model": model}}
                yield name, lambda to, spoilt=spoilt: torch.save(spoilt, to / "checkpoint.pt")


def file_faults(folder: Path) -> Iterator[Fault]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"):
        whole, name = path.read_bytes(), path.relative_to(folder).as_posix()
        yield name, lambda to, name=name: (to / name).unlink()
        for content in (*CONTENTS, *(whole[: len(whole) * part // 7] for part in range(1, 7)), whole[:-1]):
            yield name, lambda to, name=name, content=content: (to / name).write_bytes(content)


# -------------------------------------------------------------------------------------------------------------- tests


def complaint(words: list[str], names: Sequence[str], out: Path, good: dict[str, bytes], capsys: Any) -> str:
    """Return what is wrong with an importer's answer to a damaged directory; "" if nothing.

    names: of the damaged thing. good: the output without damage.
    """
    capsys.readouterr()
    try:
        status = main(words)
    except Exception as error:
        return repr(error)
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if line.startswith("fasttfm ")]
    if status == 2 and len(lines) == 1:
        named = any(name in lines[0] for name in names)
        return "half written" if out.exists() else "" if named else f"refused without a name: {lines[0]}"
    if status or lines:
        return f"status {status}: {told.err}"
    if contents(out, *BESIDE) == good or any(name in told.out for name in (*names, "left out")):
        return ""
    return "another model without a note"


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["ctranslate2", "marian-hf", "m2m100", "fairseq", *CLASSES])
def test_a_damaged_directory_is_refused_noted_or_without_effect(kind, tmp_path, capsys):
    folder, spoilt, out = (tmp_path / name for name in (kind, "spoilt", "out"))
    write_folder(kind, folder)
    assert main(import_words(kind, folder, out)) == 0
    good, wrong = contents(out, *BESIDE), []
    faults = [*json_faults(folder), *weight_faults(folder), *file_faults(folder)]
    for what, spoil in random.Random(kind).sample(faults, min(DRAWN, len(faults))):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder, spoilt)
        spoil(spoilt)
        names = filter(None, (what, what.replace("/", "."), what.rpartition(".")[0], str(spoilt)))
        if problem := complaint(import_words(kind, spoilt, out), [*names], out, good, capsys):
            wrong.append(f"{what}: {problem}")
        shutil.rmtree(spoilt)
    assert not wrong, "\n".join(wrong)
