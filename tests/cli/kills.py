"""A command that writes, killed before its system calls (run by test_kills.py).

    python kills.py FOLDER COMMAND

COMMAND runs in a forked process that SIGKILL ends before one of its system calls; a write is done by half, a file
opened for writing is empty. POINTS calls are tried, all with FASTTFM_TEST_EVERY_CALL=1. The output must then be the old
or the new as a whole, or be refused in a line, and running the command again must succeed. Prints the counts.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from convert.exported_once import exported_once
from convert.test_spoiled_exports import COMMANDS, export_words, write_model
from killed import calls_of
from model_dirs import PAIRS, write_model_dir

from fasttfm.cli.main import main
from fasttfm.convert.exchange import load
from fasttfm.data.corpus import read_lines
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.store.checkpoint import read_weights, save_checkpoint
from fasttfm.store.steps import step_folder
from fasttfm.system.folders import reading
from fasttfm_pretraining.data.documents import PreparedDocuments
from scripts.hub import package

POINTS = 12
TEXTS = "--src A.src --tgt A.tgt --valid-src A.src --valid-tgt A.tgt --threads 1"
PREPARE = f"{TEXTS} --no-byte-fallback --vocab-size"
LM_PREPARE = "lm prepare --bytes --out data --text"


class Writer(NamedTuple):
    """A command that writes."""

    old: Callable[[], Any]
    """Writes the output that is replaced."""
    new: Callable[[], Any]
    state: Callable[[], str]
    """Reads the output as its readers do, and returns a digest."""


def command(words: str) -> Callable[[], None]:
    def run() -> None:
        assert main(words.split()) == 0

    return run


def of_both(words: str, what: tuple = ("A", "B")) -> Iterator[Callable[[], None]]:
    """The command with the first and with the second value for {}."""
    return (command(words.format(each)) for each in what)


def files(folder: str) -> str:
    """Digest of all files in a directory except the lock."""
    with reading(Path(folder)):
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file() and ".new" not in path.parts)
        contents = [(str(path), path.read_bytes()) for path in paths if path.name != ".lock"]
    if not contents:
        raise UserError(f"{folder}: is empty")
    return digest(*contents)


def model(folder: str) -> str:
    loaded = load(Path(folder), "last")
    weights = [(name, each.numpy().tobytes()) for name, each in sorted(loaded.weights.items())]
    return digest(loaded.config, loaded.source_tokenizer.model, *weights)


def pairs() -> str:
    data = PreparedData.open("data")
    return digest(data.description["fingerprint"], [data.train.source(i).tolist() for i in range(len(data.train))])


def documents() -> str:
    data = PreparedDocuments.open("data")
    return digest(data.description["fingerprint"], len(data.train.offsets))


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def save_pretrained(folder: str) -> Callable[[], None]:
    return lambda: Transformer.from_pretrained(folder).save_pretrained("out", folder)


def average() -> str:
    return digest(sorted((name, each.numpy().tobytes()) for name, each in read_weights(AVERAGE).items()))


def of_family(kind: str, verb: str) -> Writer:
    """Export or import of language models, BERTs and fine-tuned models."""

    def run(name: str) -> None:
        words = export_words(kind, Path(f"{kind}-{name}"), Path("out"))
        if verb == "import":
            words = [words[0], "import", f"theirs-{name}", "--no-check", "--out", "out"]
        assert main(words) == 0

    def old() -> None:
        for seed, name in enumerate("AB"):
            write_model(kind, Path(f"{kind}-{name}"), seed)
            assert main(export_words(kind, Path(f"{kind}-{name}"), Path(f"theirs-{name}"))) == 0
        run("A")

    return Writer(old, lambda: run("B"), lambda: files("out"))


AVERAGE = Path("A/checkpoints/average")
WRITERS = {
    "prepare": Writer(*of_both(f"prepare {PREPARE} {{}} --out data", (60, 64)), pairs),
    "lm prepare": Writer(*of_both(f"{LM_PREPARE} A.{{}}", ("src", "tgt")), documents),
    **{
        f"export {form}": Writer(*of_both(f"export {{}} --format {form} --no-check --out out"), lambda: files("out"))
        for form in ("marian-hf", "ctranslate2", "pretrained", "onnx")
    },
    **{f"{COMMANDS[kind]} export": of_family(kind, "export") for kind in ("gpt", "bert", "squad")},
    **{f"{COMMANDS[kind]} import": of_family(kind, "import") for kind in ("gpt", "bert", "squad")},
    "import": Writer(*of_both("import marian-{} --format marian-hf --no-check --out out"), lambda: model("out")),
    "quantize": Writer(*of_both("quantize {} --out out"), lambda: model("out")),
    "save_pretrained": Writer(save_pretrained("A"), save_pretrained("B"), lambda: model("out")),
    "average": Writer(*of_both("average A --last {}", (2, 3)), average),
    "hub": Writer(
        lambda: package.write_package(Path("out"), version=1),
        lambda: package.write_package(Path("out")),
        lambda: files("out"),
    ),
    "shortlist": Writer(
        *of_both("shortlist A --data pairs --best {} --out list", (1, 3)),
        lambda: digest(list(read_lines(Path("list")))),
    ),
}


def make_world() -> None:
    """Write models A and B of different widths, their exports, and text."""
    for name, texts in (("A.src", PAIRS), ("A.tgt", PAIRS.values())):
        Path(name).write_text("".join(f"{line}\n" for line in texts) * 20)
    for name, width in (("A", 32), ("B", 16)):
        fields = {"d_model": width, "norm_first": False, "final_norm": False, "encoder_layers": 1, "decoder_layers": 1}
        write_model_dir(Path(name), trained=False, **fields)
        assert main(["export", name, "--format", "marian-hf", "--no-check", "--out", f"marian-{name}"]) == 0
    weights = read_weights(step_folder("A", 1))
    for step in (2, 3):
        save_checkpoint(step_folder("A", step), {n: each * step for n, each in weights.items()}, {"step": step})
    assert main([*f"prepare {TEXTS} --spm A/spm.model --out pairs".split()]) == 0


def state_or_refusal(writer: Writer) -> str:
    try:
        return writer.state()
    except UserError:
        return "refused"


def try_every_call(writer: Writer, root: Path) -> Counter[str]:
    """Count the states found after each kill."""
    os.chdir(root / "world")
    writer.old()
    states = {writer.state(): "old"}
    shutil.copytree(root / "world", root / "original", symlinks=True)
    writer.new()
    new = writer.state()
    assert states.get(new) is None, "the new is not the old"
    states[new] = "new"
    found: Counter[str] = Counter()
    begin_again(root)
    for number in points(calls_of(10**9, writer.new)):
        begin_again(root)
        calls_of(number, writer.new)
        state = state_or_refusal(writer)
        assert state == "refused" or state in states, (number, "neither old nor new")
        found[states.get(state, state)] += 1
        writer.new()
        assert writer.state() == new, (number, "run again it does not come to the new")
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


if __name__ == "__main__":
    root, name = Path(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    package._sources = functools.cache(package._sources)
    torch.onnx.export = exported_once(torch.onnx.export)  # type: ignore[assignment]
    (root / "world").mkdir(parents=True)
    os.chdir(root / "world")
    with contextlib.redirect_stdout(io.StringIO()):
        make_world()
        result = try_every_call(WRITERS[name], root)
    print(dict(result))
