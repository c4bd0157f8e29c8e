"""Who owns the files of a folder: a manifest lists what a command wrote, and nothing else is ever replaced.

    FOLDER/sha256sums     a file a line, as `sha256sum --check sha256sums` reads it
           .lock          locked while a command writes here
           .new/          what is being written; a kill leaves it behind, and the next run deletes it
           .ready/        complete: its files are moved into their places, by the next run if this one is killed

The folder itself stays where it is, so that it may be a link, a mounted disk or the folder that a shell stands in.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fasttfm.errors import UserError
from fasttfm.files import refuse_dangling_link, sha256, unreadable
from fasttfm.locks import LOCK_FILE, locked

MANIFEST = "sha256sums"
_HEADER = "# written by fasttfm, which replaces no other files than these\n"
_NEW, _READY = ".new", ".ready"
_SHOWN = 3


@dataclass(slots=True)
class Replacement:
    """A fresh directory for the files that are to take the place of a folder's."""

    path: Path
    wanted: bool = True
    """Set it to False to leave the folder as it is."""


@contextmanager
def replacing(folder: Path, doing: str) -> Iterator[Replacement]:
    """Collect files that take the place of those in `folder` when the block ends well, and vanish when it does not.

    doing: what a second process is told that this one does. Raises UserError for a folder that holds files which its
    manifest does not list, for files that were changed since, and while another process writes into it.
    """
    refuse_dangling_link(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: exists and is not a directory: choose another --out")
    _refuse_strangers(folder)
    existed = folder.exists()
    try:
        with locked(folder, doing):
            _move_ready(folder)
            fresh = folder / _NEW
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            try:
                replacement = Replacement(fresh)
                yield replacement
                if replacement.wanted:
                    _write_manifest(fresh)
                    _refuse_strangers(folder)  # again: minutes may have passed
                    fresh.rename(folder / _READY)  # from here on it is the new files that count
                    _move_ready(folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    finally:
        if not existed and folder.is_dir() and os.listdir(folder) == [LOCK_FILE]:
            with suppress(OSError):
                (folder / LOCK_FILE).unlink()
                folder.rmdir()


def is_unfinished(folder: Path) -> bool:
    """Whether a process was killed while it moved files into their places: they are of two kinds then."""
    return (folder / _READY).exists()


def read_manifest(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of each file that was written. Raises UserError where the manifest is missing or damaged."""
    path = folder / MANIFEST
    remedy = "run fasttfm prepare into another --out"
    try:
        header, *lines = path.read_bytes().decode().splitlines(keepends=True) or [""]
    except FileNotFoundError:
        raise UserError(f"{path}: is missing, so that damage could go unnoticed: {remedy}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is damaged: {remedy}") from None
    except OSError as error:
        raise unreadable(path, error) from error
    matches = [re.fullmatch(r"([0-9a-f]{64})  ([^/\n]+)\n", line) for line in lines]
    if header != _HEADER or not matches or not all(matches):
        raise UserError(f"{path}: is {'damaged' if header else 'empty'}: {remedy}")
    return {match[2]: match[1] for match in matches if match}


class Verification:
    """Compares the files of a folder with its manifest, in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where the manifest is missing or damaged."""
        self._folder, self._digests = folder, read_manifest(folder)
        self._complaint: str | None = None
        self._thread = threading.Thread(target=self._compare, name="verification", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise UserError if a damaged file was found so far."""
        if self._complaint is not None:
            raise UserError(self._complaint)

    def finish(self) -> None:
        """Wait until every file was compared; raises as check()."""
        self._thread.join()
        self.check()

    def _compare(self) -> None:
        for name, digest in self._digests.items():
            path = self._folder / name
            try:
                differs = sha256(path) != digest
            except OSError as error:
                self._complaint = str(unreadable(path, error))
                return
            if differs:
                self._complaint = (
                    f"{path}: is damaged or changed, its SHA-256 is not the one in {MANIFEST}: move it away and run "
                    "fasttfm prepare again"
                )
                return


def _write_manifest(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    lines = (f"{sha256(folder / name)}  {name}\n" for name in names)
    (folder / MANIFEST).write_bytes((_HEADER + "".join(lines)).encode())


def _refuse_strangers(folder: Path) -> None:
    """Raise UserError for a folder that holds what no manifest lists, or other content than listed."""
    known: dict[str, set[str]] = {}
    for root in (folder, folder / _READY):
        with suppress(UserError):
            for name, digest in read_manifest(root).items():
                known.setdefault(name, set()).add(digest)
    helpers = {LOCK_FILE, _NEW, _READY, *([MANIFEST] if known else [])}
    present = sorted(set(os.listdir(folder)) - helpers) if folder.is_dir() else []
    strangers = [name for name in present if name not in known]
    if strangers:
        shown = ", ".join(strangers[:_SHOWN]) + (f" and {len(strangers) - _SHOWN} more" if strangers[_SHOWN:] else "")
        kind = "this is a model directory" if "config.yaml" in strangers else "this directory holds other files"
        raise UserError(f"{folder}: {kind} ({shown}), which are not replaced: choose another --out, or move them away")
    for name in present:
        if sha256(folder / name) not in known[name]:
            raise UserError(
                f"{folder / name}: was changed since it was written, and is not replaced: move it away, or choose "
                "another --out"
            )


def _move_ready(folder: Path) -> None:
    """Put complete new files into their places, and remove the old ones. Killed anywhere, it can be done again."""
    ready = folder / _READY
    if not ready.exists():
        return
    with suppress(UserError):  # without a manifest it has been moved already, the last of all
        names = read_manifest(ready)
        with suppress(UserError):
            for name in read_manifest(folder):
                if name not in names:
                    (folder / name).unlink(missing_ok=True)
        for name in (*names, MANIFEST):
            if (ready / name).exists():
                os.replace(ready / name, folder / name)
    shutil.rmtree(ready)
