"""Files that survive a kill and a power cut, and what the operating system says when one cannot be read.

A file that cannot be read is not a damaged file: the disk may not be mounted, or the file may be another user's. Only
what was read and is wrong is called damaged, and what may be healthy is never advised to be deleted.
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
    errno.EACCES: "it may be whole: make it readable (chmod, chown), then run the same command again",
    errno.EPERM: "it may be whole: make it readable (chmod, chown), then run the same command again",
    errno.ENOTDIR: "put the directory back in its place",
    errno.ELOOP: "its link leads back to itself: put it right",
    errno.EMFILE: "allow more open files (ulimit -n), then run the same command again",
}


def refuse_bytes(path: Path) -> None:
    """Raise UserError for a path that is not UTF-8: readers of weights take no other."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: the path is not UTF-8, which readers of weights cannot open: rename it") from None


def sync(path: Path) -> None:
    """Make a file or a directory's entries survive a power cut; Windows opens no directory, and syncs them itself."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # fsync needs the right to write there
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


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and vanishes when it does not.

    It is written beside `path`, synced and renamed: a kill or a full disk leaves the old content or the new one, never
    half of it, and the next writing clears away what a kill has left. A link is followed and stays; a device or a pipe
    is written into. Raises UserError for a directory, and while another process writes the same file.
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
    beside = unfinished(target)
    descriptor = _open_alone(beside, path)
    try:
        with open(descriptor, "wb") as file:
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, stat.S_IMODE(mode))
            yield file
            file.flush()
            os.fsync(descriptor)
            if fcntl is None:
                file.close()  # an open file could not be renamed there
            os.replace(beside, target)
        sync(target.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(path)  # a full disk does not say which file it had no room for
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def unfinished(path: Path) -> Path:
    """Return the name of a file while it is written; a kill leaves it."""
    return path.with_name(f".{path.name}.unfinished")


def _open_alone(beside: Path, path: Path) -> int:
    """A descriptor of the empty file `beside`, which no other process has; UserError where one has it."""
    while True:
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            error.filename = os.fspath(path)  # the name that the user knows
            raise
        try:
            if fcntl is not None:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"{path}: another process is writing it: wait for it, or name another") from None
                except OSError:
                    pass  # a disk without locks
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(beside)):
                        os.ftruncate(descriptor, 0)
                        return descriptor
                os.close(descriptor)  # the other process has just given it its name
                continue
            os.ftruncate(descriptor, 0)
            return descriptor
        except BaseException:
            os.close(descriptor)
            raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file as writing() does, unless it has this content; UserError where it cannot be written."""
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        with writing(path) as file:
            file.write(content)
    except OSError as error:
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
    return _parsed(path, parse_json, kind)


def read_plain_yaml(path: Path) -> dict[str, Any]:
    """The object that a YAML file of ours holds; UserError where it is missing, damaged or something else."""
    return _parsed(path, parse_yaml, dict)


def _parsed(path: Path, parse: Callable[[bytes, type], Any], kind: type) -> Any:
    try:
        return parse(path.read_bytes(), kind)
    except FileNotFoundError:
        raise UserError(f"{path}: is missing: give the directory as it was saved") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except Malformed as error:
        raise UserError(f"{path}: {error}: copy it again") from None


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits, read piece by piece; OSError where it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
