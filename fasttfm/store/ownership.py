"""Atomic creation, replacement and deletion of checkpoint directories, by one process at a time.

A process locks the checkpoints' directory while it writes there. So unfinished files that it finds were left by a
process that has ended, in whatever container or on whatever host.
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
    """Replace `target` durably by the directory filled in the block; if the block raises, `target` is unchanged.

    Complete the directory with describe(). Other processes that write in the parent directory wait.
    """
    path = target.parent / f"{_WRITING}{target.name}"
    with _alone(target.parent):
        _tidy(target.parent)
        path.mkdir()
        try:
            yield path
            if target.exists():
                # recover() repairs a kill between these two renames
                os.replace(target, target.parent / f"{_REPLACED}{target.name}")
            os.replace(path, target)
            sync(target.parent)
        finally:
            _tidy(target.parent)


def describe(folder: Path, digests: Mapping[str, str], meta: Mapping[str, Any]) -> None:
    """Add sha256sums and meta.json to the files of a checkpoint. digests: by file name."""
    write_file(folder / DIGESTS_FILE, _lines(digests))
    # meta.json last: it marks the directory as complete even if the rename is not atomic
    write_file(folder / META_FILE, (json.dumps(dict(meta), indent=1) + "\n").encode())
    sync(folder)


def drop(folder: Path, name: str) -> None:
    """Delete a file of a complete checkpoint and its line in sha256sums, which is correct at any time."""
    with suppress(FileNotFoundError):
        digests = read_digests(folder)
        if digests.pop(name, None) is not None:
            replace_file(folder / DIGESTS_FILE, _lines(digests))
    (folder / name).unlink(missing_ok=True)


def _lines(digests: Mapping[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()


def read_digests(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 in a checkpoint directory; OSError if they cannot be read."""
    lines = (folder / DIGESTS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def recover(folder: Path) -> None:
    """Clean up after a process that was killed while it wrote, replaced or deleted a checkpoint."""
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
    """Delete a directory atomically: rename it first, so that a kill leaves no partial checkpoint."""
    doomed = folder.parent / f"{_DELETING}{folder.name}-{secrets.token_hex(4)}"
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a directory of checkpoints, if its file system has locks."""
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
