"""One writer per directory, across containers and hosts.

The lock is a file that is locked while its process lives; it contains the process name for error messages.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fasttfm.errors import UserError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"


@contextmanager
def locked(model_dir: Path, doing: str = "training into it") -> Iterator[None]:
    """Lock a directory against other writers. The operating system releases the lock when the process ends."""
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
                f"{model_dir}: another process{holder} is {doing}; wait for it or use another --out"
            ) from error
        except OSError as error:
            raise UserError(
                f"{model_dir}: its file system has no locks ({error.strerror}), so concurrent runs could corrupt it: "
                "use an --out on another disk"
            ) from error
        try:
            file.truncate(0)
            name = f"number {os.getpid()} on {socket.gethostname()}\n"
            os.write(file.fileno(), name.encode())  # unbuffered: closing must not fail
        except OSError as error:
            raise UserError(f"{file.name}: {error.strerror}: free some space, or use another --out") from error
        yield
