"""Every exporter in trouble: a place that cannot be written, a disk that fills up, an interrupt, a damaged model.

Each ends in one line that names the file, leaves nothing half written, and the same command works afterwards.
"""

import errno
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import largest_file
from model_dirs import TEXT, contents, write_model_dir

from fasttfm.cli.main import main
from fasttfm.config import RunConfig, sections_of
from fasttfm.config.training import TrainingConfig
from fasttfm.store.weights import model_weights
from fasttfm.system.folders import is_unfinished
from fasttfm.system.parsing import parse_yaml, write_yaml
from fasttfm_pretraining.data.text_tokenizer import train_text_tokenizer
from fasttfm_pretraining.models.kinds import CLASSES
from fasttfm_pretraining.models.saved import write_run
from fasttfm_pretraining.training.finetuning import task_model

from .exported_once import exported_once
from .test_spoiled_folders import CONTENTS, Fault, spoilt_weights

FORMATS = {"ctranslate2": ("ctranslate2",), "marian-hf": (), "onnx": ("onnx", "onnxscript"), "pretrained": ()}
"""--format of fasttfm export -> what it needs."""
COMMANDS = {
    **dict.fromkeys(("gpt", "llama"), "lm"),
    **dict.fromkeys(("bert", "albert", "electra"), "mlm"),
    **dict.fromkeys(("squad", "choices", "classify"), "finetune"),
}
"""Kind of model -> the command that exports it."""
EXPORTERS = (*FORMATS, *COMMANDS)
SIZE = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "max_length": 24}
LABELS = {"squad": [], "choices": ["0", "1", "2", "3"], "classify": ["no", "yes"]}
EXPORTED_ONCE = exported_once(torch.onnx.export)
DRAWN = 10
"""Of each exporter's damages, and half as many of the calls at which it is interrupted; of onnx, which is slow, 2."""


def drawn(kind: str, several: Sequence[Any], most: int) -> list[Any]:
    """Some of them, always the same."""
    chosen = random.Random(kind).sample(range(len(several)), min(2 if kind == "onnx" else most, len(several)))
    return [(number, several[number]) for number in sorted(chosen)]


def write_model(kind: str, folder: Path, seed: int = 1) -> None:
    """A good model directory."""
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
    """The command line that exports it."""
    if kind in FORMATS:
        return ["export", str(model), "--format", kind, "--no-check", "--out", str(out)]
    return [COMMANDS[kind], "export", str(model), "--no-check", "--out", str(out)]


@pytest.fixture(params=EXPORTERS)
def kind(request, monkeypatch):
    if request.param == "onnx":
        export = torch.onnx.export

        def call(*arguments: Any, **options: Any) -> None:
            """On a full disk it is PyTorch that writes."""
            is_full = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
            (export if is_full else EXPORTED_ONCE)(*arguments, **options)

        monkeypatch.setattr(torch.onnx, "export", call)
    return request.param


# --------------------------------------------------------------------------------------------------- where it writes


@pytest.mark.sample(2)
def test_a_place_that_cannot_be_written_is_named_and_left_as_it_is(kind, tmp_path, monkeypatch, refusal_of):
    model = tmp_path / "model"
    write_model(kind, model)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("the user's")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    before = contents(tmp_path)
    for out in ("file", "link", "others", "file/below", "model", "model/checkpoints", "model/inside", "n" * 300):
        path = tmp_path / out
        inside = out == "model/inside"
        line = refusal_of(export_words(kind, model, path)) if not inside else str(path)
        assert str(path) in line or str(path.parent) in line, out
        assert contents(tmp_path) == before, out
    make = os.mkdir

    def refused(path: Any, *options: Any, **more: Any) -> None:
        if str(path).startswith(str(tmp_path / "out")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        make(path, *options, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refused)
        assert str(tmp_path / "out") in refusal_of(export_words(kind, model, tmp_path / "out"))
    assert contents(tmp_path) == before
    assert main(export_words(kind, model, tmp_path / "out")) == 0


@pytest.mark.sample(2)
def test_a_full_disk_leaves_what_was_there(kind, tmp_path, refusal_of):
    model, out = tmp_path / "model", tmp_path / "out"
    write_model(kind, model)
    words = export_words(kind, model, out)
    assert main(words) == 0
    good = contents(out)
    sizes = sorted(len(content) for content in good.values())
    for _, size in drawn(kind, sorted({0, sizes[0] - 1, sizes[len(sizes) // 2] - 1, sizes[-1] - 1}), 4):
        for is_there in (True, False):
            if not is_there:
                shutil.rmtree(out)
            with largest_file(size):
                line = refusal_of(words)
            assert str(out) in line
            assert contents(out) == good if is_there else not out.exists()
        assert main(words) == 0
        assert contents(out) == good


# ------------------------------------------------------------------------------------------------------- interrupted


class Interrupter:
    """Sends SIGINT at a call that writes."""

    CALLS = ("mkdir", "write", "fsync", "rename", "replace")

    def __init__(self, patch: pytest.MonkeyPatch, below: Path, number: int) -> None:
        self.left, self.below = number, str(below)
        for name in self.CALLS:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, original: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
            return original(*arguments, **options)

        return call


@pytest.mark.sample(2)
def test_an_interrupt_leaves_nothing_or_all(kind, tmp_path, monkeypatch, capsys):
    model, out = tmp_path / "model", tmp_path / "out"
    write_model(kind, model)
    words = export_words(kind, model, out)
    with monkeypatch.context() as patch:
        counter = Interrupter(patch, out, -1)
        assert main(words) == 0
    calls, good = -1 - counter.left, contents(out)
    for _, number in drawn(kind, range(1, calls + 1), DRAWN // 2):
        shutil.rmtree(out)
        capsys.readouterr()
        with monkeypatch.context() as patch:
            Interrupter(patch, out, number)
            status = main(words)
        told = capsys.readouterr().err.splitlines()
        assert (status, len(told)) in ((130, 1), (0, 0)), told
        if out.exists() and not is_unfinished(out):
            assert contents(out) == good, number
        assert main(words) == 0
        assert contents(out) == good


# --------------------------------------------------------------------------------------------------- damaged models


def damages(folder: Path) -> Iterator[Fault]:
    """Of every file of a model directory."""
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
                    continue  # it holds the same numbers
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
def test_a_damaged_model_is_refused_or_exported_as_ever(kind, tmp_path, capsys):
    model, out = tmp_path / "model", tmp_path / "out"
    write_model(kind, model)
    for path in (model / "sha256sums", *model.glob("checkpoints/*/sha256sums")):
        path.unlink(missing_ok=True)  # which would tell all
    assert main(export_words(kind, model, out)) == 0
    good = contents(out)
    faults, wrong = [*damages(model)], []
    spoilt = tmp_path / "spoilt"
    for number, (what, spoil) in drawn(kind, faults, DRAWN):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(model, spoilt)
        spoil(spoilt)
        if told := complaint(export_words(kind, spoilt, out), what, out, good, capsys):
            wrong.append(f"{number}, {what}: {told}")
        shutil.rmtree(spoilt)
    assert not wrong, "\n".join(wrong)


def complaint(words: list[str], what: str, out: Path, good: dict[str, bytes], capsys: Any) -> str:
    """What is wrong with the answer to a damaged model; "" for nothing."""
    capsys.readouterr()
    try:
        status = main(words)
    except Exception as error:
        return repr(error)
    told = capsys.readouterr()
    lines = told.err.splitlines()
    if status == 2 and len(lines) == 1:
        named = any(name in lines[0] for name in (*what.split(" or "), Path(what).parent.name or what))
        return "half written" if out.exists() else "" if named else f"refused without a name: {lines[0]}"
    if status or lines:
        return f"status {status}: {told.err}"
    if contents(out) != good and not any(name in told.out for name in what.split(" or ")):
        return "another export, and nothing was told"
    return ""
