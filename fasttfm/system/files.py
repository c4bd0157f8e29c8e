"""Atomic, durable file writes, and error messages for files that cannot be read.

An unreadable file is not a damaged one: the disk may not be mounted, or the file may belong to another user. Only files
that were read and are wrong are called damaged, and no message recommends deleting a file that may be intact.
"""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fasttfm.errors import UserError
from fasttfm.system.locks import fcntl
from fasttfm.system.parsing import Malformed, parse_json, parse_yaml

_REMEDIES = {
    errno.EACCES: "it may be intact: make it readable (chmod, chown), then run the same command again",
    errno.EPERM: "it may be intact: make it readable (chmod, chown), then run the same command again",
    errno.ENOTDIR: "restore the directory",
    errno.ELOOP: "its link leads back to itself: correct it",
    errno.EMFILE: "allow more open files (ulimit -n), then run the same command again",
}


def refuse_bytes(path: Path) -> None:
    """Raise UserError for a path that is not UTF-8, which safetensors cannot open."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: the path is not UTF-8, so weights cannot be read from it: rename it") from None


def sync(path: Path) -> None:
    """fsync a file or directory. Windows cannot open directories and syncs their entries itself."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows requires write access
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and fsync it. OSError names the file."""
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


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Replace `path` atomically by the file written in the block; if the block raises, `path` is unchanged.

    The file is written next to `path`, synced and renamed, so a kill or a full disk leaves the old or the new content;
    the next call removes leftovers of a kill. Links are followed; devices and pipes are written directly. Raises
    UserError for a directory, and while another process writes the same file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise UserError(f"{path}: is a directory: give the name of a file")
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    temporary = unfinished(target)
    descriptor = _open_alone(temporary, path)
    try:
        with open(descriptor, "wb") as file:
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(descriptor)
            if fcntl is None:
                file.close()  # Windows cannot rename an open file
            os.replace(temporary, target)
        sync(target.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(path)  # missing from the error of a full disk
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def unfinished(path: Path) -> Path:
    """The temporary name of a file while it is written; a kill leaves it behind."""
    return path.with_name(f".{path.name}.unfinished")


def _open_alone(temporary: Path, path: Path) -> int:
    """A descriptor of the empty, exclusively locked file `temporary`; UserError if another process has it."""
    while True:
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            error.filename = os.fspath(path)  # not the temporary name
            raise
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"{path}: another process is writing it: wait, or choose another name") from None
                except OSError:
                    pass  # a file system without locks
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(temporary)):
                    os.ftruncate(descriptor, 0)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process has just renamed the file: open a new one


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as writing() does, unless it already has this content; UserError if that fails."""
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        with writing(path) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; free some space or use another --out") from error


def entries(folder: Path) -> list[str]:
    """Sorted names in a directory; empty if it does not exist.

    Raises UserError for an unreadable directory and for a dangling link, as to an unmounted disk.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError as error:
        refuse_dangling_link(folder, error)
        return []
    except OSError as error:
        raise unreadable(folder, error) from error


def refuse_dangling_link(path: Path, error: OSError | None = None) -> None:
    """Raise UserError if `path` is a dangling link."""
    if path.is_symlink() and not path.exists():
        raise UserError(
            f"{path}: is a link to {os.readlink(path)}, which does not exist: mount that disk or correct the link"
        ) from error


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a file or directory that exists but cannot be read."""
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "it may be intact: check its disk, then run the same command again")
    return UserError(f"{path}: cannot be read: {reason}; {remedy}")


def read_content(path: Path, missing: str = "is missing: give the directory as it was saved") -> bytes:
    """The bytes of a file; UserError if it is unreadable or missing. missing: message for the latter."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: {missing}") from None
    except OSError as error:
        raise unreadable(path, error) from error


def read_json(path: Path, kind: type = dict) -> Any:
    """The content of a JSON file; UserError if it is missing, truncated or not of type `kind`."""
    return _parsed(path, parse_json, kind)


def read_plain_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file written by fasttfm; UserError if it is missing, damaged or not an object."""
    return _parsed(path, parse_yaml, dict)


def _parsed(path: Path, parse: Callable[[bytes, type], Any], kind: type) -> Any:
    content = read_content(path)
    try:
        return parse(content, kind)
    except Malformed as error:
        raise UserError(f"{path}: {error}: copy it again") from None


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal; OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
