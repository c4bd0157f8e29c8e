"""Every exporter on a damaged model: it is refused by the name of the file, or exported as before.

Kills and full disks are in tests/cli/test_kills.py.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_dirs import TEXT, write_model_dir
from safetensors.torch import load_file, save_file

from fasttfm.config import RunConfig, sections_of
from fasttfm.config.training import TrainingConfig
from fasttfm.store.weights import model_weights
from fasttfm.system.parsing import parse_yaml, write_yaml
from fasttfm_pretraining.data.text_tokenizer import train_text_tokenizer
from fasttfm_pretraining.models.kinds import CLASSES
from fasttfm_pretraining.models.saved import write_run
from fasttfm_pretraining.training.finetuning import task_model

from .test_spoiled_folders import Fault, complaints, file_faults, spoilt_weights

FORMATS = {"ctranslate2": ("ctranslate2",), "marian-hf": (), "onnx": ("onnx", "onnxscript"), "pretrained": ()}
"""--format of fasttfm export -> required packages."""
COMMANDS = {
    **dict.fromkeys(("gpt", "llama"), "lm"),
    **dict.fromkeys(("bert", "albert", "electra"), "mlm"),
    **dict.fromkeys(("squad", "choices", "classify"), "finetune"),
}
"""Kind of model -> command that exports it."""
SIZE = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "max_length": 24}
LABELS = {"squad": [], "choices": ["0", "1", "2", "3"], "classify": ["no", "yes"]}


def exported_once(export: Callable[..., Any]) -> Callable[..., None]:
    """Wrap torch.onnx.export, which takes seconds: a graph that was written before is copied from memory."""
    cache: dict[str, bytes] = {}

    def call(module: torch.nn.Module, given: tuple, path: Path, **options: Any) -> None:
        buffers = [(name, each.numpy().tobytes()) for name, each in sorted(module.state_dict().items())]
        key = hashlib.sha256(repr((type(module), module.config, buffers)).encode()).hexdigest()
        if key not in cache:
            export(module, given, path, **options)
            cache[key] = path.read_bytes()
        path.write_bytes(cache[key])

    return call


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


def damages(folder: Path) -> Iterator[Fault]:
    """Faults of every file of a model directory, of every setting and of every weight."""
    yield from file_faults(folder)
    given = parse_yaml((folder / "config.yaml").read_bytes())
    for field in given["model"]:
        for wrong in ([], {}, "x", -1, float("nan")):
            text = write_yaml({**given, "model": {**given["model"], field: wrong}})
            yield "config.yaml", lambda to, text=text: (to / "config.yaml").write_text(text)
    for path in folder.rglob("*.safetensors"):
        whole, name = load_file(path), path.relative_to(folder)
        for weight, weights in spoilt_weights(whole):
            if weight in weights and weight in whole and weights[weight].dtype != whole[weight].dtype:
                continue  # the same values in another dtype are valid
            yield (
                f"{name} or {weight}",
                lambda to, name=name, weights=weights: save_file(weights, to / name, {"format": "pt"}),
            )


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [*FORMATS, *COMMANDS])
def test_a_damaged_model_is_refused_or_exported_unchanged(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.onnx, "export", exported_once(torch.onnx.export))
    model, out = tmp_path / kind, tmp_path / "out"
    write_model(kind, model)
    digests = [*model.rglob("sha256sums")]
    assert digests
    for path in digests:
        path.unlink()  # they would reveal every change

    def names(what: str) -> list[str]:
        return [*what.split(" or "), Path(what).parent.name or what]

    drawn = 2 if kind == "onnx" else 10  # onnx is slow
    wrong = complaints(model, [*damages(model)], drawn, lambda path: export_words(kind, path, out), names, out, capsys)
    assert not wrong, wrong
