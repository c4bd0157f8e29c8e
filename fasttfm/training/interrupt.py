"""Ctrl-C that never leaves anything half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interruption:
    """While active, the first Ctrl-C sets `requested` and lets the running update finish; the second stops at once.

    In a block under `at_once` the first one raises KeyboardInterrupt as usual, because nothing there can be left half
    done. Outside the main thread Python delivers no signals and everything stays as it is.
    """

    def __init__(self) -> None:
        self.requested = False
        self._immediate = False
        self._previous: Any = None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """The block may be stopped in the middle."""
        self._immediate = True
        try:
            yield
        finally:
            self._immediate = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if again or self._immediate:
            raise KeyboardInterrupt
