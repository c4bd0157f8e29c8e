"""Files that survive a kill and a power cut, and what the operating system says when one cannot be read.

A file that cannot be read is not a damaged file: the disk may not be mounted, or the file may be another user's. Only
what was read and is wrong is called damaged, and what may be healthy is never advised to be deleted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fasttfm.errors import UserError

_REMEDIES = {
    errno.EACCES: "it may be whole: make it readable (chmod, chown), then run the same command again",
    errno.EPERM: "it may be whole: make it readable (chmod, chown), then run the same command again",
    errno.ENOTDIR: "put the directory back in its place",
    errno.ELOOP: "its link leads back to itself: put it right",
    errno.EMFILE: "allow more open files (ulimit -n), then run the same command again",
}


def sync(path: Path) -> None:
    """Make a file or a directory's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and sync it. OSError names the file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
        try:
            rest = memoryview(content)
            while rest:  # a single call takes 2 GiB at most
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a kill leaves the old content or the new one, never half of it."""
    if path.is_file() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}")
    try:
        write_file(temporary, content)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}; make room or give another --out") from error


def entries(folder: Path) -> list[str]:
    """Names in a directory, sorted; none where there is no directory.

    Raises UserError for one that is there and cannot be read, and for a link to what is not there: an unmounted disk.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError as error:
        refuse_dangling_link(folder, error)
        return []
    except OSError as error:
        raise unreadable(folder, error) from error


def refuse_dangling_link(path: Path, error: OSError | None = None) -> None:
    """Raise UserError when `path` is a link to what is not there."""
    if path.is_symlink() and not path.exists():
        raise UserError(
            f"{path}: is a link to {os.readlink(path)}, which is not there: mount that disk or put the link right"
        ) from error


def unreadable(path: Path, error: OSError) -> UserError:
    """The complaint about a file or directory that the operating system does not give out."""
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "it may be whole: check its disk, then run the same command again")
    return UserError(f"{path}: cannot be read: {reason}; {remedy}")


def read_json(path: Path, kind: type = dict) -> Any:
    """The object (or list, by kind) that a file holds; UserError where it is missing, cut off or something else."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: is missing: give the directory as it was saved") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise UserError(f"{path}: is cut off or no JSON ({error}): copy it anew") from None
    if not isinstance(given, kind):
        raise UserError(f"{path}: holds no {kind.__name__}: copy it anew")
    return given


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits, read piece by piece; OSError where it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
