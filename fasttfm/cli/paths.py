"""Argument types for paths, one for each purpose; all paths are checked before a command starts its work.

    parser.add_argument("--out", type=OUTPUT_FILE, …)

A command never overwrites its inputs, nor files in a model or data directory that another command wrote. Directories
it reads are complete: an interrupted replacement is finished or refused, digests are verified (fasttfm.system.folders).
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
    """Argument type of a path."""

    metavar: str = "FILE"
    """Default metavar in --help."""
    writes: bool = False
    is_file: bool | None = None
    """None: a file or a directory."""
    replaces: bool = False
    """The output directory is replaced as a whole."""
    compared: bool = False
    """Digests of the input directory are verified here, not by its loader."""
    or_word: bool = False
    """Words such as `best` are allowed: the value stays a string."""
    own: str = ""
    """File name under which the command may write into a model directory."""

    def __call__(self, text: str) -> Path | str:
        """Parse the argument; raises ArgumentTypeError if it cannot be a path."""
        if "\0" in text:  # impossible from a shell, possible from a program that calls main()
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
"""Replaced atomically as a whole (fasttfm.system.folders.replacing)."""
TRAINED_MODEL = PathKind(writes=True, is_file=False, metavar="MODEL")
"""A model directory to create or to resume."""
SHARED_FOLDER = PathKind(writes=True, is_file=False, metavar="DIR")
"""Shared by several commands, such as the download folder."""
_CHECKPOINTS, _CONFIG_FILE = "checkpoints", "config.yaml"


@dataclass(frozen=True)
class _Given:
    flag: str
    path: Path
    kind: PathKind
    was_given: bool
    """False for a default."""

    def error(self, reason: str, remedy: str = "") -> UserError:
        return UserError(f"{self.flag} {self.path}: {reason}: {remedy or f'choose another {self.flag}'}")


def check_paths(args: argparse.Namespace) -> None:
    """Raise UserError for an output that would overwrite other files, and for a damaged input directory."""
    given = list(_given(args))
    for output in given:
        if output.kind.writes:
            _refuse_overwriting(output, given)
    _refuse_streams(given)
    for each in given:
        if (each.kind.writes and each.kind is not TRAINED_MODEL) or not each.path.is_dir():
            continue
        settled(each.path)
        if each.kind.compared and has_manifest(each.path):
            compare(each.path)


def _refuse_overwriting(output: _Given, given: Sequence[_Given]) -> None:
    """Raise UserError if an output is also an input, or belongs to a directory of another command."""
    if output.was_given or output.kind is not SHARED_FOLDER:
        for other in given:
            if other is not output:
                _refuse_pair(output, other)
    if output.kind.is_file:
        _refuse_file(output, given)
    elif output.kind.replaces and output.path.name == _CHECKPOINTS and (output.path.parent / _CONFIG_FILE).is_file():
        raise output.error(f"has the name of the checkpoints of {output.path.parent}")


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
        raise output.error(f"is {other.flag} of this command, and would be overwritten")
    if output.kind is SHARED_FOLDER or other.kind.writes:
        return
    if output.kind.is_file is False and _is_inside(other.path, output.path):
        remedy = f"choose another {output.flag}"
        if output.kind.replaces:
            raise other.error(f"is in the directory that {output.flag} replaces", remedy)
        if other.path.is_file() and not (output.path / _CHECKPOINTS).is_dir():
            raise other.error(f"is in the new model directory {output.path}", remedy)


def _refuse_file(output: _Given, given: Sequence[_Given]) -> None:
    """Raise UserError unless the file is new or the user's own, outside the directories of models and data."""
    path = output.path
    if str(path) == "-":
        raise output.error("is written to a file", "give its name (./- for a file that is called so)")
    if path.is_dir():
        raise output.error("is a directory", "give the name of a file")
    target = Path(os.path.realpath(path))
    folder, other = target.parent, f"or choose another {output.flag}"
    if not folder.is_dir():
        raise output.error(f"there is no directory {folder}", f"make it first, {other}")
    if (target.is_file() or not target.exists()) and not os.access(folder, os.W_OK | os.X_OK):
        raise output.error(f"nothing can be written into {folder}", f"allow it, {other}")
    if (owned := owner(target)) is not None:
        owning, is_listed = owned
        if is_listed or output.kind.own != target.name or target.parent != owning:
            kind = "is a file" if target.exists() else "has the name of a file"
            raise output.error(f"{kind} of {owning}, which this command did not make")
    with suppress(OSError):
        if path.stat().st_nlink > 1:
            folders = (each.path for each in given if not each.kind.writes and each.path.is_dir())
            for file in (file for folder in folders for file in folder.rglob("*")):
                if _same(file, path):
                    raise output.error(f"is {file}, which this command reads")


def _refuse_streams(given: Sequence[_Given]) -> None:
    """Raise UserError for a path that is the file behind standard input or output."""
    source, result = _stream(sys.stdin), _stream(sys.stdout)
    if source is not None and result is not None and os.path.samestat(source, result):
        raise UserError("standard input and standard output are one file: write into another")
    for each in given:
        with suppress(OSError):
            status = each.path.stat()
            if source is not None and each.kind.writes and os.path.samestat(source, status):
                raise each.error("is standard input")
            if result is not None and os.path.samestat(result, status):
                raise each.error("is standard output, which is emptied", "write into another")


def _stream(stream: object) -> os.stat_result | None:
    """Return the stat of a standard stream redirected to a regular file; None for a terminal, pipe or device."""
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
