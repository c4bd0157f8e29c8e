"""Commands that write, with SIGKILL before any of their system calls, and on a full disk.

tests/store/test_kill.py kills saves of checkpoints, tests/test_folders.py the replacement of a folder's files.
"""

import contextlib
import functools
import hashlib
import io
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from convert.exporters import exported_once
from forked import run
from full_disk import largest_file
from killed import calls_of, environment
from model_dirs import LINES, contents, write_model_dir
from waiting import PATIENCE

from fasttfm.cli.main import main
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.system.folders import reading

POINTS = 12
TEXTS = "prepare --src A.src --tgt A.tgt --valid-src A.src --valid-tgt A.tgt --threads 1"
OUT = Path("out")


class Writer(NamedTuple):
    """A command that writes OUT."""

    old: Callable[[], Any]
    """Writes what is replaced."""
    new: Callable[[], Any]


def command(words: str) -> None:
    assert main(words.split()) == 0


def both(words: str, what: tuple = ("A", "B")) -> Writer:
    """The command with the first and with the second value for {}."""
    return Writer(*(functools.partial(command, words.format(each)) for each in what))


def save_pretrained(folder: str) -> None:
    Transformer.from_pretrained(folder).save_pretrained(OUT, folder)


WRITERS = {
    "prepare": both(f"{TEXTS} --no-byte-fallback --vocab-size {{}} --out out", ("60", "64")),
    "lm prepare": both("lm prepare --bytes --text A.{} --out out", ("src", "tgt")),
    **{
        f"export {form}": both(f"export {{}} --format {form} --no-check --out out")
        for form in ("marian-hf", "ctranslate2", "pretrained", "onnx")
    },
    "import": both("import marian-{} --format marian-hf --no-check --out out"),
    "quantize": both("quantize {} --out out"),
    "save_pretrained": Writer(*(functools.partial(save_pretrained, each) for each in "AB")),
    "shortlist": both("shortlist A --data pairs --best {} --out out", ("1", "3")),
}


def write_text() -> None:
    for side, lines in (("src", LINES), ("tgt", LINES[::-1])):
        Path(f"A.{side}").write_text("".join(f"{line}\n" for line in lines) * 30)


def make_world() -> None:
    """Write models A and B of different widths, their exports, and text."""
    write_text()
    for name, width in (("A", 32), ("B", 16)):
        fields = {"d_model": width, "norm_first": False, "final_norm": False, "encoder_layers": 1, "decoder_layers": 1}
        write_model_dir(Path(name), trained=False, **fields)
        command(f"export {name} --format marian-hf --no-check --out marian-{name}")
    command(f"{TEXTS} --spm A/spm.model --out pairs")


def state() -> str:
    """Read the output as its readers do, and return a digest of its files."""
    with reading(OUT) if OUT.is_dir() else contextlib.nullcontext():
        files = contents(OUT) if OUT.exists() else {}
    files = {name: content for name, content in files.items() if not name.startswith(".new/")}
    if not files:
        raise UserError("nothing was written")
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def try_every_call(writer: Writer, root: Path) -> Counter[str]:
    """Count the states found after each kill."""
    os.chdir(root / "world")
    writer.old()
    states = {state(): "old"}
    shutil.copytree(root / "world", root / "original", symlinks=True)
    writer.new()
    new = state()
    assert new not in states, "the new is not the old"
    states[new] = "new"
    found: Counter[str] = Counter()
    begin_again(root)
    for number in points(calls_of(10**9, writer.new)):
        begin_again(root)
        calls_of(number, writer.new)
        try:
            left = states.get(state(), "mixed")
        except UserError:
            left = "refused"
        assert left != "mixed", (number, "neither old nor new")
        found[left] += 1
        writer.new()
        assert state() == new, (number, "run again it does not come to the new")
    return found


def begin_again(root: Path) -> None:
    os.chdir(root)
    shutil.rmtree(root / "world")
    shutil.copytree(root / "original", root / "world", symlinks=True)
    os.chdir(root / "world")


def points(calls: int) -> list[int]:
    """The numbers of the calls to try, with the first and the last."""
    if os.environ.get("FASTTFM_TEST_EVERY_CALL") or calls <= POINTS:
        return list(range(1, calls + 1))
    return [1 + place * (calls - 1) // (POINTS - 1) for place in range(POINTS)]


def killed_often(root: Path, name: str) -> None:
    """Check a command, in a process of its own that forks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.onnx.export = exported_once(torch.onnx.export)
    (root / "world").mkdir()
    os.chdir(root / "world")
    with contextlib.redirect_stdout(io.StringIO()):
        make_world()
        found = try_every_call(WRITERS[name], root)
    assert found["new"] >= 1
    assert found["old"] >= 4


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", WRITERS)
def test_after_a_kill_the_output_is_old_new_or_refused_and_a_rerun_succeeds(name, tmp_path):
    """Of POINTS system calls, all with FASTTFM_TEST_EVERY_CALL=1, a write is done by half, an opened file is empty."""
    program = f"import test_kills; test_kills.killed_often(test_kills.Path({str(tmp_path)!r}), {name!r})"
    options = {"env": environment(), "cwd": Path(__file__).parent, "capture_output": True, "timeout": PATIENCE}
    done = run([sys.executable, "-c", program], text=True, **options)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def model(tmp_path, monkeypatch) -> None:
    """A model A and text, in the working folder."""
    monkeypatch.chdir(tmp_path)
    write_model_dir(Path("A"), trained=False)
    write_text()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "words", ["quantize A", "export A --format pretrained", f"{TEXTS} --no-byte-fallback --vocab-size 60"]
)
@pytest.mark.parametrize("size", [0, 300, 4000])
def test_a_full_disk_leaves_nothing_half_made(words, size, model, monkeypatch):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    with largest_file(size):
        assert main([*words.split(), "--out", "out"]) == 2
    assert not Path("out").exists()
    assert main([*words.split(), "--out", "out"]) == 0
