"""Faults around a command: broken files, permissions, wrong flags, odd paths.

A world is a directory with text, prepared data, a trained model and user files that no command may touch. A situation
is one command in a copy of a world with up to two faults. Permissions are simulated in `open`, because root may read
everything.
"""

import builtins
import contextlib
import errno
import io
import json
import os
import random
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fasttfm.cli.main import main
from fasttfm.config import SECTIONS, field_types

TINY_MODEL = (
    "--d-model 16 --heads 2 --d-ff 16 --encoder-layers 1 --decoder-layers 1 --max-tokens 256 --warmup-updates 2 "
    "--log-interval 1 --save-interval-updates 1 --no-tensorboard --max-len-b 2 --beam 2 --valid-interval-updates 2"
)
COMMANDS = {
    "prepare": "--src train.src --tgt train.tgt --valid-src valid.src --valid-tgt valid.tgt --no-byte-fallback "
    "--threads 1 --vocab-size 64 --out",
    "train": f"--data data --device cpu --max-update 4 {TINY_MODEL} --out",
    "average": "model --last 2",
    "translate": "model --device cpu --max-len-b 3",
    "score": "--ref valid.tgt",
    "plot": "model --device cpu --layers 1 --out picture.png --attention",
}
MOST_BYTES = 2 << 30
"""Limit of address space beyond what is in use when a command starts."""
OTHERS = ("notes.txt", "data/notes.txt", "model/notes.txt", "model/checkpoints/notes.txt")
"""User files in every directory that commands write to."""

_WORDS = ["one", "two", "three", "four", "five", "six", "red", "green", "blue", "big", "small", "tree", "dog", "bird"]
_ODD_VALUES = ["", "nan", "1_0", "010", "-1", "x", "1e400", "inf", "0x1", "ü", "\udcff", "9" * 20]
_ODD_VALUES += ["-0.5", "None", "1:30"]
_ODD_PATHS = ["", ".", "..", "absent", "absent/absent", "n" * 300, "notes.txt", "notes.txt/x", "a\nb"]
_ODD_PATHS += ["run$_{$b'", "\udcff"]
_ODD_PATHS += ["/dev/null", "/dev/full", "model", "data", "train.src", "model/checkpoints", "ü x", "-", "-x", "%s", "~"]
_ODD_TEXTS = [b"", b"\n\n", b"one\r\ntwo\rthree", "one\u2028two\x85\x0c\n".encode(), b"one\0two\n"]
_ODD_TEXTS += [b"good\nM\xe4nner\n", "one two\n".encode("utf-16"), "one two\n".encode("utf-16-be")]
_ODD_TEXTS += [b"\x1f\x8b\x08\0cut", b"\xfd7zXZ\0", b"dog " * 3000 + b"\n", "▁ <s> </s> <unk>\n".encode()]
_ODD_YAML = ["!!bool maybe", "!!timestamp nope", "[" * 9999, '"\\ud800"', "*x", "9" * 5000, "{a: {b: [c]}}", "3", "["]
_ODD_YAML += ["!!binary x", "nan", "1_0", "010", "-1", "x", "1e400", "0x1", "1:30", "null", ".inf", "!x y", "{}"]
_ODD_JSON = ["[" * 99_999, '{"a":' * 9999, '"\\ud800"', "1" + "0" * 30, "9" * 5000, "1e999", "NaN", "null", "[]", "{}"]
_ODD_JSON += ["true", '"x"', "-1", "1000000000", "3.5", '[["\\udfff"]]']
_SLOW_FLAGS = {"--threads", "--max-update", "--max-epoch", "--max-minutes", "--help"}


@dataclass
class Situation:
    """A command and its faults."""

    draw: random.Random
    command: str
    arguments: list[str]
    text: bytes = b""
    faults: list[str] = field(default_factory=list)
    seams: list[contextlib.AbstractContextManager] = field(default_factory=list)

    def __str__(self) -> str:
        return f"fasttfm {self.command} {self.arguments!r} with {' and '.join(self.faults)}"


class Outcome(NamedTuple):
    """Result of a command."""

    status: int | None
    """None if it raised an exception."""
    errors: str
    """Standard error, including that of libraries."""


@contextlib.contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    """contextlib.chdir of Python 3.11."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def make_world(folder: Path) -> None:
    """Text, prepared data, a model of three updates, input files of other commands, and the user's own files."""
    draw = random.Random(1)
    for name, pairs in (("train", 60), ("valid", 6)):
        sources = [draw.choices(_WORDS, k=draw.randint(2, 6)) for _ in range(pairs)]
        for side, lines in (("src", sources), ("tgt", [words[::-1] for words in sources])):
            (folder / f"{name}.{side}").write_text("".join(" ".join(words) + "\n" for words in lines))
    with working_folder(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["prepare", *COMMANDS["prepare"].split(), "data"]) == 0
        words = COMMANDS["train"].replace("--max-update 4", "--max-update 3").split()
        assert main(["train", *words, "model"]) == 0
    asked = [{"id": "q", "question": "which dog", "answers": [{"text": "dog", "answer_start": 4}]}]
    config = {"model_type": "marian", "d_model": 16, "encoder_layers": 1, "vocab_size": 64, "decoder_layers": 1}
    (folder / "theirs").mkdir()
    for name, content in {
        "banned": "bird\n",
        "terms": "dog\tbird\n",
        "squad.json": json.dumps({"version": "1.1", "data": [{"paragraphs": [{"context": "one dog", "qas": asked}]}]}),
        "pairs.jsonl": "".join(json.dumps({"text": f"one {i}", "label": str(i % 2)}) + "\n" for i in range(6)),
        "examples.json": json.dumps([{"text": "one", "options": ["a", "b"], "answer": "a"}] * 3),
        "theirs/config.json": json.dumps(config),
        "theirs/tokenizer.json": '{"version": "1.0"}',
        **{name: f"the user's own {name}\n" for name in OTHERS},
    }.items():
        (folder / name).write_text(content)


# Faults


def _files(*endings: str) -> list[Path]:
    """The input files of the world, with one of these endings, in a fixed order."""
    files = [path for path in sorted(Path().rglob("*")) if path.is_file() and path.name != "notes.txt"]
    return [path for path in files if path.suffix not in (".png", ".svg", ".py") and path.name.endswith(endings or "")]


def break_file(situation: Situation) -> str:
    """Damage, delete or replace an input file, and perhaps standard input."""
    draw = situation.draw
    path = draw.choice(_files())
    content = path.read_bytes()
    half, position = content[: len(content) // 2], draw.randrange(max(1, len(content)))
    broken = {
        "cut": half,
        "flipped": content[:position] + bytes([content[position] ^ 64]) + content[position + 1 :] if content else b"",
        "longer": content + b"\0\xff\n",
        "noise": draw.randbytes(200),
        "latin1": half + "\nMänner\n".encode("latin1") + content[len(content) // 2 :],
        "odd text": draw.choice(_ODD_TEXTS),
    }
    how = draw.choice([*broken, "odd text", "gone", "folder", "dangling"])
    path.unlink()
    if how in broken:
        path.write_bytes(broken[how])
        situation.text = draw.choice([situation.text, broken[how]])
    elif how == "folder":
        path.mkdir()
    elif how == "dangling":
        path.symlink_to("/absent/disk")
    return f"{path} {how}"


def change_value(situation: Situation) -> str:
    """Put an odd value into a JSON or YAML file; digests are not updated."""
    draw = situation.draw
    files = _files(".json", ".jsonl", ".yaml")
    if not files:
        return "no value left to change"
    path = draw.choice(files)
    text, odd = path.read_text("utf-8", "replace"), draw.choice(_ODD_YAML if path.suffix == ".yaml" else _ODD_JSON)
    values = list(re.finditer(r"(?<=[:,\[] )[^][{},\n]+", text))
    start, end = draw.choice(values).span() if values else (0, len(text))
    path.write_text(text[:start] + odd + text[end:], "utf-8")
    return f"{path} with {odd[:60]} at {start}"


def change_argument(situation: Situation) -> str:
    """Make a flag wrong, unknown, duplicate, or give it no value or an odd one; or take an odd path."""
    arguments, draw = situation.arguments, situation.draw
    how = draw.choice(["value", "value", "value", "path", "path", "unknown", "removed", "doubled", "word"])
    flags = [position for position, word in enumerate(arguments) if word.startswith("--") and word not in _SLOW_FLAGS]
    position = draw.choice(flags) if flags else None
    paths = [position for position, word in enumerate(arguments) if "." in word or word in ("model", "data", "fresh")]
    if how == "value" and situation.command in ("train", "translate"):
        sections = SECTIONS if situation.command == "train" else ["decoding"]
        names = [f"--{name.replace('_', '-')}" for section in sections for name in field_types(SECTIONS[section])]
        arguments += [draw.choice([name for name in names if name not in _SLOW_FLAGS]), draw.choice(_ODD_VALUES)]
    elif how == "value" and position is not None and position + 1 < len(arguments):
        arguments[position + 1] = draw.choice(_ODD_VALUES)
    elif how == "path" and paths:
        arguments[draw.choice(paths)] = draw.choice(_ODD_PATHS)
    elif how == "removed" and position is not None:
        del arguments[position : position + draw.choice([1, 2])]
    elif how == "doubled" and position is not None:
        arguments += arguments[position : position + 2]
    elif how == "word":
        arguments.insert(draw.randrange(len(arguments) + 1), draw.choice(_ODD_VALUES))
    else:
        arguments.append(draw.choice(["--d-modle", "--unknown", "-x", "--beam=", "--max-tok=3", "--pad-id=3"]))
    return f"argument {how}"


def deny(situation: Situation) -> str:
    """Deny access to a file or directory."""
    path = situation.draw.choice([*_files(), *(Path(name) for name in ("data", "model", "model/checkpoints"))])
    number = situation.draw.choice([errno.EACCES, errno.EACCES, errno.EIO, errno.EROFS])
    situation.seams.append(_denied(path, number))
    return f"{path} {errno.errorcode[number]}"


@contextlib.contextmanager
def _denied(denied: Path, number: int) -> Iterator[None]:
    """Let whatever opens this file or directory of the world fail."""
    world, originals = Path.cwd(), {}

    def checked(original: Callable) -> Callable:
        def wrapper(path: object = ".", *arguments: object, **options: object) -> object:
            if isinstance(path, (str, bytes, os.PathLike)) and world / os.fsdecode(path) == world / denied:
                raise OSError(number, os.strerror(number), str(denied))
            return original(path, *arguments, **options)

        return wrapper

    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "listdir"), (os, "scandir")):
        originals[module, name] = getattr(module, name)
        setattr(module, name, checked(originals[module, name]))
    try:
        yield
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


@contextlib.contextmanager
def _limited(resource_: int, most: int) -> Iterator[None]:
    """Limit a resource of this process."""
    before = resource.getrlimit(resource_)
    resource.setrlimit(resource_, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource_, before)


FAULTS: list[Callable[[Situation], str]] = [*[change_value] * 3, *[break_file] * 3, *[change_argument] * 3, deny]


# Running


def run_here(situation: Situation, folder: Path) -> Outcome:
    """Run in this process with redirected streams; an exception from main is written as a traceback."""
    errors = folder / "errors"
    status: int | None = None
    with errors.open("wb") as file, _streams(situation, file.fileno()), contextlib.ExitStack() as stack:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        stack.enter_context(_limited(resource.RLIMIT_AS, pages * resource.getpagesize() + MOST_BYTES))
        try:
            for seam in situation.seams:
                stack.enter_context(seam)
            status = main([situation.command, *situation.arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        except Exception:
            sys.stderr.write(traceback.format_exc())
        except KeyboardInterrupt:
            sys.stderr.write("Traceback: an interrupt left main\n")
    return Outcome(status, errors.read_text(encoding="utf-8", errors="replace"))


@contextlib.contextmanager
def _streams(situation: Situation, errors: int) -> Iterator[None]:
    """Redirect the standard streams; descriptor 2, which C++ writes to, goes to `errors` too."""
    before, descriptor = (sys.stdin, sys.stdout, sys.stderr), os.dup(2)
    os.dup2(errors, 2)
    sys.stdin = io.TextIOWrapper(io.BytesIO(situation.text), encoding="utf-8")
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(errors), "wb"), encoding="utf-8", errors="backslashreplace")
    opened = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in opened:
            with contextlib.suppress(OSError):
                stream.close()
        sys.stdin, sys.stdout, sys.stderr = before
        os.dup2(descriptor, 2)
        os.close(descriptor)
