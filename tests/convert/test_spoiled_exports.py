"""Every exporter on a damaged model: it is refused by the name of the file, or exported as before.

Kills and full disks are in tests/cli/test_kills.py.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_dirs import TEXT, write_model_dir

from fasttfm.config import RunConfig, sections_of
from fasttfm.config.training import TrainingConfig
from fasttfm.store.weights import model_weights
from fasttfm.system.parsing import parse_yaml, write_yaml
from fasttfm_pretraining.data.text_tokenizer import train_text_tokenizer
from fasttfm_pretraining.models.kinds import CLASSES
from fasttfm_pretraining.models.saved import write_run
from fasttfm_pretraining.training.finetuning import task_model

from .exported_once import exported_once
from .test_spoiled_folders import CONTENTS, Fault, complaints, spoilt_weights

FORMATS = {"ctranslate2": ("ctranslate2",), "marian-hf": (), "onnx": ("onnx", "onnxscript"), "pretrained": ()}
"""--format of fasttfm export -> required packages."""
COMMANDS = {
    **dict.fromkeys(("gpt", "llama"), "lm"),
    **dict.fromkeys(("bert", "albert", "electra"), "mlm"),
    **dict.fromkeys(("squad", "choices", "classify"), "finetune"),
}
"""Kind of model -> command that exports it."""
EXPORTERS = (*FORMATS, *COMMANDS)
SIZE = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "max_length": 24}
LABELS = {"squad": [], "choices": ["0", "1", "2", "3"], "classify": ["no", "yes"]}
EXPORTED_ONCE = exported_once(torch.onnx.export)
DRAWN = 10
"""Faults tried per exporter; 2 for onnx, which is slow."""


def write_model(kind: str, folder: Path, seed: int = 1) -> None:
    """Write a valid model directory."""
    if kind in FORMATS:
        for name in FORMATS[kind]:
            pytest.importorskip(name)
        fields = {"norm_first": False, "final_norm": False, "encoder_layers": 1, "decoder_layers": 1}
        write_model_dir(folder, trained=False, **fields)
        return
    tokenizer = train_text_tokenizer(TEXT, 340)
    more: dict[str, Any] = {"embedding_size": 8} if kind in ("albert", "electra") else {}
    if kind in LABELS:
        more |= {"pooler": kind != "squad", "sentence_head": False}
        more |= {"labels": 1 if kind == "choices" else 2} if kind != "squad" else {}
    config = sections_of(kind)["model"](vocab_size=len(tokenizer), **SIZE, **more)
    torch.manual_seed(seed)
    model = task_model(kind, config) if kind in LABELS else CLASSES[kind](config)
    run = RunConfig(kind=kind, model=config, data=sections_of(kind)["data"](), training=TrainingConfig())
    description = {"labels": LABELS[kind], "columns": [], "abstains": False} if kind in LABELS else None
    write_run(folder, run, model_weights(model), tokenizer, description)


def export_words(kind: str, model: Path, out: Path) -> list[str]:
    """Return the command line that exports the model."""
    if kind in FORMATS:
        return ["export", str(model), "--format", kind, "--no-check", "--out", str(out)]
    return [COMMANDS[kind], "export", str(model), "--no-check", "--out", str(out)]


# --------------------------------------------------------------------------------------------------- damaged models


def damages(folder: Path) -> Iterator[Fault]:
    """Faults of every file of a model directory."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"):
        whole, name = path.read_bytes(), path.relative_to(folder).as_posix()
        yield name, lambda to, name=name: (to / name).unlink()
        for content in (*CONTENTS, *(whole[: len(whole) * part // 5] for part in range(1, 5)), whole[:-1]):
            yield name, lambda to, name=name, content=content: (to / name).write_bytes(content) and None
        if path.name == "config.yaml":
            yield from of_settings(name, parse_yaml(whole))
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file, save_file

            given = load_file(path)
            for weight, weights in spoilt_weights(given):
                if weight in weights and weight in given and weights[weight].dtype != given[weight].dtype:
                    continue  # the same values in another dtype are valid
                yield (
                    f"{name} or {weight}",
                    lambda to, name=name, weights=weights: save_file(weights, to / name, {"format": "pt"}),
                )


def of_settings(name: str, given: dict[str, Any]) -> Iterator[Fault]:
    for field in given["model"]:
        for wrong in ([], {}, "x", -1, float("nan")):
            changed = {**given, "model": {**given["model"], field: wrong}}
            yield name, lambda to, changed=changed: (to / name).write_text(write_yaml(changed)) and None


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", EXPORTERS)
def test_a_damaged_model_is_refused_or_exported_unchanged(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.onnx, "export", EXPORTED_ONCE)
    model, out = tmp_path / "model", tmp_path / "out"
    write_model(kind, model)
    digests = [*model.rglob("sha256sums")]
    assert digests
    for path in digests:
        path.unlink()  # they would reveal every change
    faults = [*damages(model)]
    numbers = sorted(random.Random(kind).sample(range(len(faults)), 2 if kind == "onnx" else DRAWN))

    def names(what: str) -> list[str]:
        return [*what.split(" or "), Path(what).parent.name or what]

    wrong = complaints(model, faults, numbers, lambda path: export_words(kind, path, out), names, out, capsys)
    assert not wrong, wrong
