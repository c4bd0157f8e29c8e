"""One writer a directory, whatever container or host it runs in.

A lock is a file that is locked while its process lives; it holds the process's identity, for whoever is refused.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fasttfm.errors import UserError
from fasttfm.parsing import parse_json

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing to lock with
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"


@contextmanager
def locked(model_dir: Path, doing: str = "training into it") -> Iterator[None]:
    """Let only one process write into a directory at a time. The lock ends with the process, however it ends."""
    model_dir.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with (model_dir / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise UserError(
                f"{model_dir}: another process{_described(file.read())} is {doing}; wait for it or give another --out"
            ) from error
        except OSError as error:
            raise UserError(
                f"{model_dir}: its disk has no locks ({error.strerror}), so two runs could spoil each other: give "
                "--out a directory on another disk"
            ) from error
        try:
            file.truncate(0)
            os.write(file.fileno(), json.dumps(identity()).encode())  # at once: nothing is left for the end to write
        except OSError as error:
            raise UserError(f"{file.name}: {error.strerror}: free some space, or give another --out") from error
        yield


def identity() -> dict[str, str | int | None]:
    return {"host": socket.gethostname(), "boot": boot_identity(), "process": os.getpid()}


def boot_identity() -> str | None:
    """Return a name of the running kernel until it is started again; None where nothing names it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def _described(owner: str) -> str:
    """The owner of a lock for a message, as far as it is known."""
    try:
        identity = parse_json(owner)
        return f" (number {identity['process']} on {identity['host']})"
    except (ValueError, LookupError, TypeError):
        return ""
