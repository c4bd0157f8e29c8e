"""One owner of each unfinished checkpoint.

Processes that share a directory may live in other containers or on other hosts, where a process number says nothing.
An unfinished checkpoint therefore holds a file `.owner`, locked while its process lives, with a name of the running
kernel: within one kernel the lock tells whether the owner is alive, whatever the container. Work of another
kernel, and of an owner who is not named, is left alone for a day.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fasttfm.system.files import replace_file, sync, write_file
from fasttfm.system.locks import fcntl

WRITING = ".writing-"
REPLACED = ".replaced-"
DELETING = ".deleting-"
META_FILE = "meta.json"
DIGESTS_FILE = "sha256sums"
_OWNER_FILE = ".owner"
_ABANDONED_AFTER = 24 * 3600
"""Seconds without a change after which unfinished work of another kernel is taken for abandoned."""


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[Path]:
    """A new directory in `folder` that is this process's own; what is left of it when the block ends is deleted.

    describe() completes it, published() gives it its final name.
    """
    path = folder / f"{WRITING}{name}-{secrets.token_hex(4)}"
    path.mkdir()
    file: IO[str] | None = None
    try:
        file = (path / _OWNER_FILE).open("w")
        if fcntl is not None:
            with suppress(OSError):  # a disk without locks: age decides
                fcntl.flock(file, fcntl.LOCK_EX)
        file.write(_kernel())  # after the lock: who reads a name can trust the lock
        file.flush()
        if fcntl is None:
            file.close()  # an open file could not be deleted there
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if file is not None:
            file.close()


def describe(folder: Path, digests: Mapping[str, str], meta: Mapping[str, Any]) -> None:
    """Add sha256sums and meta.json to the files of a checkpoint. digests: of these, by their names."""
    write_file(folder / DIGESTS_FILE, _lines(digests))
    # meta.json last: with it the directory would be complete even if the rename were not atomic
    write_file(folder / META_FILE, (json.dumps(dict(meta), indent=1) + "\n").encode())
    sync(folder)


def drop(folder: Path, name: str) -> None:
    """Delete a file of a complete checkpoint, and its line: what `sha256sum --check` reads is true at any moment."""
    with suppress(FileNotFoundError):
        digests = read_digests(folder)
        if digests.pop(name, None) is not None:
            replace_file(folder / DIGESTS_FILE, _lines(digests))
    (folder / name).unlink(missing_ok=True)


def _lines(digests: Mapping[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()


def read_digests(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of the files of a checkpoint directory; OSError where they cannot be read."""
    lines = (folder / DIGESTS_FILE).read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def published(path: Path, target: Path) -> None:
    """Give a claimed directory its final name, for good; what had that name is replaced."""
    with _exclusive(target.parent):
        if target.exists():
            # a kill between these two renames is what recover puts right
            os.replace(target, target.parent / f"{REPLACED}{target.name}")
        os.replace(path, target)
    os.unlink(target / _OWNER_FILE)  # last: up to its final name the directory has an owner
    sync(target.parent)


def recover(folder: Path) -> None:
    """Tidy up behind a process that was killed while it wrote, replaced or deleted a checkpoint."""
    if not folder.is_dir():
        return
    with _exclusive(folder):
        for path in folder.glob(f"{REPLACED}*"):
            original = folder / path.name.removeprefix(REPLACED)
            if original.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.replace(path, original)
        for path in folder.glob(f"{DELETING}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in folder.glob(f"{WRITING}*"):
            if _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def delete(folder: Path) -> None:
    """Delete a directory so that a kill in the middle leaves no half of it under a good name."""
    doomed = folder.parent / f"{DELETING}{folder.name}-{secrets.token_hex(4)}"
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    """Return whether the owner of an unfinished directory is gone."""
    owner = path / _OWNER_FILE
    kernel = _kernel()
    try:
        if kernel and fcntl is not None and owner.read_text() == kernel:
            with owner.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
    except BlockingIOError:
        return False
    except (OSError, ValueError):
        pass  # no owner is named, or its disk has no locks
    try:
        changed = max(each.stat().st_mtime for each in (path, *path.iterdir()))
    except OSError:
        return False  # it has just got its final name, or is another user's
    return time.time() - changed > _ABANDONED_AFTER


def _kernel() -> str:
    """Return a name of the running kernel until it is started again; "" where nothing names it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Only one process at a time renames in a directory, as far as its disk has locks."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
