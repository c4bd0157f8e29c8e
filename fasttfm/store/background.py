"""Writing beside training: one checkpoint at a time, in a thread.

What is written is a copy, made before the thread starts, so that training may change the original. The calls of the
operating system are those of writing at once, in the same order, by one thread: a kill or a power cut finds the earlier
checkpoints whole.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path


class Background:
    """Runs one function at a time in a thread; what it raises is raised by the next call here."""

    def __init__(self) -> None:
        # its thread is not a daemon: the interpreter waits for what it writes before it ends, whatever ends the run
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future[Path] | None = None
        self._done: list[Path] = []

    def start(self, write: Callable[[], Path]) -> None:
        """Begin `write`, which returns what it has written, after the one before has ended."""
        self._finish()
        self._running = self._executor.submit(write)

    def written(self, wait: bool = False) -> list[Path]:
        """Return what has been written since the last call, at the moment or (wait) when the running one has ended.

        Raises what the writing raised.
        """
        if wait or (self._running is not None and self._running.done()):
            self._finish()
        done, self._done = self._done, []
        return done

    def leave(self) -> None:
        """Wait for the end, whatever it is: another error is on its way. Nothing can be started afterwards."""
        self._executor.shutdown()

    def _finish(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            self._done.append(running.result())
