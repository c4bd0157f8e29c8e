"""Writing beside training: one checkpoint at a time, in a thread.

What is written is a copy, made before the thread starts, so that training may change the original. The calls of the
operating system are those of writing at once, in the same order, by one thread: a kill or a power cut finds the earlier
checkpoints whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path


class Background:
    """Runs one function at a time in a thread; what it raises is raised by the next call here."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._done: list[Path] = []

    def start(self, write: Callable[[], Path]) -> None:
        """Begin `write`, which returns what it has written, after the one before has ended."""
        self._join()
        # no daemon: the interpreter waits for it before it ends, whatever ends the run
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def written(self, wait: bool = False) -> list[Path]:
        """What has been written since the last call, at the moment or (wait) when the running one has ended.

        Raises what the writing raised.
        """
        if wait or (self._thread is not None and not self._thread.is_alive()):
            self._join()
        done, self._done = self._done, []
        return done

    def leave(self) -> None:
        """Wait for the end, whatever it is: another error is on its way."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._done.append(write())
        except BaseException as error:  # told by the thread that trains
            self._error = error

    def _join(self) -> None:
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
