"""Purpose of each path on a command line, as the `type` of its argument; all are checked before any work.

    parser.add_argument("--out", type=OUTPUT_FILE, …)

A command writes no file that it reads, and in the folder of a model or of data none that it did not make. What it reads
is whole: a replacement that was cut off is finished or refused, and digests are compared once (fasttfm.system.folders).
"""

import argparse
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fasttfm.errors import UserError
from fasttfm.system.folders import compare, has_manifest, owner, settled


@dataclass(frozen=True, kw_only=True)
class PathKind:
    """The `type` of an argument that is a path."""

    metavar: str = "FILE"
    """Placeholder of the path in a flag's help, unless the argument has its own."""
    writes: bool = False
    is_file: bool | None = None
    """None: a file or a folder."""
    replaces: bool = False
    """Of a folder that is written: nothing else stays in it."""
    compared: bool = False
    """Of a folder that is read: its files are compared with their digests here, not by who loads it."""
    or_word: bool = False
    """Other words are allowed, such as `best`: it stays a string."""
    own: str = ""
    """Of a file that is written: the name under which the command writes it into a model's folder."""

    def __call__(self, text: str) -> Path | str:
        """The value of the argument, as argparse asks for it; raises ArgumentTypeError for what names no file."""
        if "\0" in text:  # ValueError from whatever opens it; no shell can give one, a program that calls main() can
            raise argparse.ArgumentTypeError(f"{text!r}: the name of a file holds no null byte")
        return text if self.or_word else Path(text)


INPUT = PathKind(compared=True)
INPUT_FILE = PathKind(is_file=True)
INPUT_FOLDER = PathKind(is_file=False, metavar="FOLDER", compared=True)
MODEL = PathKind(is_file=False, metavar="MODEL")
LOADED_FOLDER = PathKind(is_file=False, metavar="FOLDER")
CHECKPOINT = PathKind(or_word=True)
"""A path, or a word such as `best`."""
CHECKPOINT_OR_MODEL = PathKind()
OUTPUT_FILE = PathKind(writes=True, is_file=True)
OUTPUT_PICTURE = PathKind(writes=True, is_file=True, own="attention.png")
OUTPUT_SHORTLIST = PathKind(writes=True, is_file=True, own="vmap.txt")
OUTPUT_FOLDER = PathKind(writes=True, is_file=False, replaces=True)
"""Made anew, all of it or nothing (fasttfm.system.folders.replacing)."""
TRAINED_MODEL = PathKind(writes=True, is_file=False, metavar="MODEL")
"""A model directory that is created, or gone on with."""
SHARED_FOLDER = PathKind(writes=True, is_file=False, metavar="DIR")
"""Files of several commands lie there, such as downloads."""
_CHECKPOINTS, _CONFIG_FILE = "checkpoints", "config.yaml"


@dataclass(frozen=True)
class _Given:
    flag: str
    path: Path
    kind: PathKind
    was_given: bool
    """False for a default."""


def check_paths(args: argparse.Namespace) -> None:
    """Raise UserError for a path that may not be written, and for a folder to read that is damaged."""
    given = list(_given(args))
    _refuse_overwriting(given)
    _refuse_streams(given)
    for each in given:
        if (each.kind.writes and each.kind is not TRAINED_MODEL) or not each.path.is_dir():
            continue
        settled(each.path)
        if each.kind.compared and has_manifest(each.path):
            compare(each.path)


def _refuse_overwriting(given: Sequence[_Given]) -> None:
    """Raise UserError where something that is written is read too, or belongs to a folder of others."""
    for output in given:
        if not output.kind.writes:
            continue
        for other in given:
            if other is not output and (output.was_given or output.kind is not SHARED_FOLDER):
                _refuse_pair(output, other)
        if output.kind.is_file:
            _refuse_file(output, given)
        elif (
            output.kind.replaces and output.path.name == _CHECKPOINTS and (output.path.parent / _CONFIG_FILE).is_file()
        ):
            raise UserError(
                f"{output.flag} {output.path}: has the name of the checkpoints of {output.path.parent}: choose another"
            )


def _given(args: argparse.Namespace) -> Iterator[_Given]:
    for action in args.parser._actions:
        kind, value = action.type, getattr(args, action.dest, None)
        if isinstance(kind, PathKind) and value is not None:
            flag = action.option_strings[0] if action.option_strings else action.metavar or action.dest
            for each in value if isinstance(value, list) else [value]:
                if not kind.or_word or os.path.exists(each):
                    yield _Given(flag, Path(each), kind, each is not action.default)


def _refuse_pair(output: _Given, other: _Given) -> None:
    if other.kind is SHARED_FOLDER and not other.was_given:
        return
    if _same(output.path, other.path):
        raise UserError(
            f"{output.flag} {output.path}: is {other.flag} of this command, and would be overwritten: choose another"
        )
    if output.kind is SHARED_FOLDER or other.kind.writes:
        return
    if output.kind.is_file is False and _is_inside(other.path, output.path):
        if output.kind.replaces:
            raise UserError(
                f"{other.flag} {other.path}: stands in the directory that {output.flag} replaces: choose another "
                f"{output.flag}"
            )
        if other.path.is_file() and not (output.path / _CHECKPOINTS).is_dir():
            raise UserError(
                f"{other.flag} {other.path}: stands in the new model directory {output.path}: choose another "
                f"{output.flag}"
            )


def _refuse_file(output: _Given, given: Sequence[_Given]) -> None:
    """A file's name must be free, or the file the user's own, outside of all folders of models and data."""
    path, flag = output.path, output.flag
    if str(path) == "-":
        raise UserError(f"{flag} -: is written to a file: give its name (./- for a file that is called so)")
    if path.is_dir():
        raise UserError(f"{flag} {path}: is a directory: give the name of a file")
    target = Path(os.path.realpath(path))
    folder = target.parent
    if not folder.is_dir():
        raise UserError(f"{flag} {path}: there is no directory {folder}: make it first, or choose another {flag}")
    if (target.is_file() or not target.exists()) and not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{flag} {path}: nothing can be written into {folder}: allow it, or choose another {flag}")
    found = owner(target)
    if found is not None and not (output.kind.own == target.name and target.parent == found.folder and not found.lists):
        raise UserError(
            f"{flag} {path}: {'is a file' if target.exists() else 'has the name of a file'} of {found.folder}, which "
            f"this command did not make: choose another {flag}"
        )
    with suppress(OSError):
        if path.stat().st_nlink > 1:
            for each in given:
                if not each.kind.writes and each.path.is_dir():
                    for file in each.path.rglob("*"):
                        if _same(file, path):
                            raise UserError(
                                f"{flag} {path}: is {file}, which this command reads: choose another {flag}"
                            )


def _refuse_streams(given: Sequence[_Given]) -> None:
    """Standard input and output are files of the command too where the shell has opened files."""
    source, result = _stream(sys.stdin), _stream(sys.stdout)
    if source is not None and result is not None and os.path.samestat(source, result):
        raise UserError("standard input and standard output are one file: write into another")
    for each in given:
        with suppress(OSError):
            status = each.path.stat()
            if source is not None and each.kind.writes and os.path.samestat(source, status):
                raise UserError(f"{each.flag} {each.path}: is standard input: choose another {each.flag}")
            if result is not None and os.path.samestat(result, status):
                raise UserError(f"{each.flag} {each.path}: is standard output, which is emptied: write into another")


def _stream(stream: object) -> os.stat_result | None:
    """The status of the regular file that a standard stream is; None for a terminal, a pipe and a device."""
    try:
        status = os.fstat(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        if os.path.samefile(one, other):
            return True
    return os.path.realpath(one) == os.path.realpath(other)


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents
