"""Every importer on a directory with one fault: it is refused by name, reported in a note, or has no effect.

Faults are sampled from all possible ones: a JSON field missing, of another type, absurd or unknown; a weight missing,
extra, of another shape or dtype, or NaN; a file missing, empty, truncated or with other content.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
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

Fault = tuple[str, Callable[[Path], None]]
"""Name of the damaged thing, as a message may call it, and the function that damages a directory."""

DRAWN = 12
"""Faults tried per importer."""
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", ".", "the", "cat", "##s", "sat"]
BERT = {
    "vocab_size": len(PIECES), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 20,
}  # fmt: skip
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
    "roberta": ("RobertaForMaskedLM", BERT | {"type_vocab_size": 1, "pad_token_id": 0}, "mlm"),
    "distilbert": ("DistilBertForMaskedLM", DISTILBERT, "mlm"),
    "squad": ("BertForQuestionAnswering", BERT, "finetune"),
    "classify": ("RobertaForSequenceClassification", BERT | {"type_vocab_size": 1, "pad_token_id": 0}, "finetune"),
}
"""Kind -> (class of transformers, sizes, command)."""
BESIDE = ("README.md", "sha256sums")
"""Files of a model directory that may differ between equal imports."""
KINDS = ("ctranslate2", "marian-hf", "m2m100", "fairseq", *CLASSES)


def write_folder(kind: str, folder: Path) -> None:
    """Write a valid directory."""
    if kind == "ctranslate2":
        pytest.importorskip("ctranslate2")
        model = write_model_dir(folder.parent / "model", trained=False, encoder_layers=1, decoder_layers=1)
        assert main(["export", str(model), "--format", kind, "--no-check", "--out", str(folder)]) == 0
        (folder / "sha256sums").unlink()  # other tools do not write it, and it would reveal every change
        return
    folder.mkdir()
    if kind == "marian-hf":
        write_opus(folder)
    elif kind == "m2m100":
        write_m2m(folder)
    elif kind == "fairseq":
        write_fairseq(folder, learned=(8, 8))
    else:
        name, sizes, command = CLASSES[kind]
        cls = getattr(transformers, name)
        torch.manual_seed(0)
        cls(cls.config_class(**sizes)).save_pretrained(folder)
        if command == "lm":
            (folder / "tokenizer.json").write_text(tokenizer_json())
        else:
            (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")


def import_words(kind: str, folder: Path, out: Path) -> list[str]:
    """Return the command line that imports the directory."""
    if kind in CLASSES:
        return [CLASSES[kind][2], "import", str(folder), "--no-check", "--out", str(out)]
    given = folder / "checkpoint.pt" if kind == "fairseq" else folder
    words = ["import", str(given), "--format", kind, "--no-check", "--out", str(out)]
    if kind == "fairseq":
        words += ["--dict", str(folder / "dict.src.txt"), "--dict", str(folder / "dict.tgt.txt")]
        words += ["--spm", str(folder / "spm.model")]
    elif kind == "m2m100":
        words += ["--source-language", "en", "--target-language", "de"]
    return words


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
        for name, value in given.items():
            if name not in MAY_BE_MISSING:
                yield name, written(path.name, {key: each for key, each in given.items() if key != name})
            for wrong in wrong_values(name, value):
                yield name, written(path.name, {**given, name: wrong})
        if path.name == "config.json":
            yield "unheard_of", written(path.name, {**given, "unheard_of": 3})


def wrong_values(name: str, value: Any) -> Iterator[Any]:
    """Values of another type, and absurd ones of the same type."""
    for wrong in WRONG:
        is_number = isinstance(wrong, int | float) and not isinstance(wrong, bool)
        fits = isinstance(value, float) and is_number and wrong >= 0
        if (wrong is not None or name not in MAY_BE_MISSING) and not fits:
            yield wrong


def written(name: str, given: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(json.dumps(given), encoding="utf-8") and None


def spoilt_weights(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
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
    if (folder / "model.safetensors").exists():
        whole = load_file(folder / "model.safetensors")
        for name, weights in spoilt_weights(whole):
            yield name, lambda to, weights=weights: save_file(weights, to / "model.safetensors", {"format": "pt"})
    elif (folder / "checkpoint.pt").exists():
        loaded = torch.load(folder / "checkpoint.pt", weights_only=False)
        for name, weights in spoilt_weights(loaded["model"]):
            yield name, lambda to, weights=weights: torch.save({**loaded, "model": weights}, to / "checkpoint.pt")
        settings = vars(loaded["cfg"]["model"])
        for name, value in settings.items():
            for wrong in wrong_values(name, value):
                if wrong is not None:
                    yield name, with_settings(loaded, {**settings, name: wrong})

    else:
        whole = {name: torch.from_numpy(np.array(each)) for name, each in _read_variables(folder / "model.bin").items()}
        for name, variables in spoilt_weights(whole):
            if any(each.dtype == torch.float64 for each in variables.values()):
                continue  # CTranslate2 has no such type
            yield name, lambda to, variables=variables: write_variables(to / "model.bin", variables)
        for name, value in whole.items():
            if not value.dtype.is_floating_point:
                yield (
                    name,
                    lambda to, name=name: write_variables(
                        to / "model.bin", whole | {name: torch.full_like(whole[name], 99)}
                    ),
                )


def write_variables(path: Path, variables: dict[str, torch.Tensor]) -> None:
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


def with_settings(loaded: dict[str, Any], settings: dict[str, Any]) -> Callable[[Path], None]:
    spoilt = {**loaded, "cfg": {**loaded["cfg"], "model": type(loaded["cfg"]["model"])(**settings)}}
    return lambda to: torch.save(spoilt, to / "checkpoint.pt")


def file_faults(folder: Path) -> Iterator[Fault]:
    for path in sorted(path for path in folder.iterdir() if path.name != ".lock"):
        whole, name = path.read_bytes(), path.name
        yield name, lambda to, name=name: (to / name).unlink()
        for content in (*CONTENTS, *(whole[: len(whole) * part // 7] for part in range(1, 7)), whole[:-1]):
            yield name, lambda to, name=name, content=content: (to / name).write_bytes(content) and None


# -------------------------------------------------------------------------------------------------------------- tests


def complaint(
    words: list[str], names: Sequence[str], out: Path, good: dict[str, bytes], capsys: Any, *ignored: str
) -> str:
    """Return what is wrong with a command's answer to a damaged directory; "" if nothing.

    names: one of which must occur in an error or note. good: the output without damage, but for the ignored files.
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
    if contents(out, *ignored) == good or any(name in told.out for name in (*names, "left out")):
        return ""
    return "another model without a note"


def complaints(
    folder: Path,
    faults: Sequence[Fault],
    numbers: Sequence[int],
    words: Callable[[Path], list[str]],
    names: Callable[[str], Sequence[str]],
    out: Path,
    capsys: Any,
    *ignored: str,
) -> str:
    """Return the complaints about a command on a directory with each of the numbered faults, a line each.

    words: the command line for a directory; names: of a fault; ignored: output files that may differ.
    """
    assert main(words(folder)) == 0
    good, spoilt, found = contents(out, *ignored), folder.parent / "spoilt", []
    for number in numbers:
        what, spoil = faults[number]
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder, spoilt)
        spoil(spoilt)
        if problem := complaint(words(spoilt), names(what), out, good, capsys, *ignored):
            found.append(f"{number}, {what}: {problem}")
        shutil.rmtree(spoilt)
    return "\n".join(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_directory_is_refused_noted_or_without_effect(kind, tmp_path, capsys):
    folder, out = tmp_path / "good", tmp_path / "out"
    write_folder(kind, folder)
    faults = [*json_faults(folder), *weight_faults(folder), *file_faults(folder)]
    numbers = sorted(random.Random(kind).sample(range(len(faults)), min(DRAWN, len(faults))))

    def names(what: str) -> list[str]:
        parts = (what, what.replace("/", "."), what.rpartition(".")[0], str(tmp_path / "spoilt"))
        return [part for part in parts if part]

    wrong = complaints(folder, faults, numbers, lambda path: import_words(kind, path, out), names, out, capsys, *BESIDE)
    assert not wrong, wrong
