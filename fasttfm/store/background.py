"""Writes one checkpoint at a time in a background thread.

The thread writes a copy made before it starts, with the same system calls as a synchronous save, so a kill or a power
cut leaves the earlier checkpoints intact.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path


class Background:
    """Runs one function at a time in a thread; its exceptions are raised by the next call here."""

    def __init__(self) -> None:
        # a non-daemon thread: the interpreter waits for it before exiting
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[Path] | None = None
        self._done: list[Path] = []

    def start(self, write: Callable[[], Path]) -> None:
        """Start `write`, which returns the path it has written, after the previous one has ended."""
        self._finish()
        self._running = self._executor.submit(write)

    def written(self, wait: bool = False) -> list[Path]:
        """The paths written since the last call; wait: including the running one. Raises its exceptions."""
        if wait or (self._running is not None and self._running.done()):
            self._finish()
        done, self._done = self._done, []
        return done

    def leave(self) -> None:
        """Wait for the running function, ignoring its exceptions, and shut down."""
        self._executor.shutdown()

    def _finish(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            self._done.append(running.result())
