"""Files of a checkpoint, and one process at a time that writes, replaces or tidies up among them.

A process holds the lock of the checkpoints' directory while it writes there (alone). Whatever unfinished work lies
there when another one holds it was left by a process that is gone, whatever container or host that ran in.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fasttfm.system.files import replace_file, sync, write_file
from fasttfm.system.locks import fcntl

_WRITING, _REPLACED, _DELETING = ".writing-", ".replaced-", ".deleting-"
META_FILE = "meta.json"
DIGESTS_FILE = "sha256sums"


@contextmanager
def publishing(target: Path) -> Iterator[Path]:
    """A new directory that takes the place of `target`, for good, when the block ends well, and vanishes otherwise.

    describe() is to complete it. Processes that write beside it wait.
    """
    path = target.parent / f"{_WRITING}{target.name}"
    with _alone(target.parent):
        _tidy(target.parent)
        path.mkdir()
        try:
            yield path
            if target.exists():
                # a kill between these two renames is what recover puts right
                os.replace(target, target.parent / f"{_REPLACED}{target.name}")
            os.replace(path, target)
            sync(target.parent)
        finally:
            _tidy(target.parent)


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


def recover(folder: Path) -> None:
    """Tidy up behind a process that was killed while it wrote, replaced or deleted a checkpoint."""
    if folder.is_dir():
        with _alone(folder):
            _tidy(folder)


def _tidy(folder: Path) -> None:
    for path in folder.glob(f"{_REPLACED}*"):
        original = folder / path.name.removeprefix(_REPLACED)
        if not original.exists():
            os.replace(path, original)
    for kind in (_REPLACED, _DELETING, _WRITING):
        for path in folder.glob(f"{kind}*"):
            shutil.rmtree(path, ignore_errors=True)


def delete(folder: Path) -> None:
    """Delete a directory so that a kill in the middle leaves no half of it under a good name."""
    doomed = folder.parent / f"{_DELETING}{folder.name}-{secrets.token_hex(4)}"
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process at a time writes checkpoints into a directory, as far as its disk has locks."""
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
