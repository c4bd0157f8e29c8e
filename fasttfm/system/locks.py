"""One writer a directory, whatever container or host it runs in.

A lock is a file that is locked while its process lives; it names the process, for whoever is refused.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fasttfm.errors import UserError

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
            holder = f" ({name})" if (name := file.readline().strip()) else ""
            raise UserError(
                f"{model_dir}: another process{holder} is {doing}; wait for it or give another --out"
            ) from error
        except OSError as error:
            raise UserError(
                f"{model_dir}: its disk has no locks ({error.strerror}), so two runs could spoil each other: give "
                "--out a directory on another disk"
            ) from error
        try:
            file.truncate(0)
            name = f"number {os.getpid()} on {socket.gethostname()}\n"
            os.write(file.fileno(), name.encode())  # at once: nothing is left for the end to write
        except OSError as error:
            raise UserError(f"{file.name}: {error.strerror}: free some space, or give another --out") from error
        yield
