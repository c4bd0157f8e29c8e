"""Handling of Ctrl-C, SIGTERM and SIGHUP during training, without leaving partial work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fasttfm.errors import ENDING_SIGNALS, Stopped
from fasttfm.system.signals import ignore_repeats, raise_stopped, taken_over


class Interruption:
    """While active, the first Ctrl-C, SIGTERM or SIGHUP sets `requested` and lets the current update finish.

    A second Ctrl-C stops immediately; a second SIGTERM does not, because some senders (GNU timeout) send two. Within
    at_once() the first signal, or one before it, raises KeyboardInterrupt. SIGHUP stays ignored under nohup. Outside
    the main thread nothing changes, because Python delivers no signals there.
    """

    def __init__(self) -> None:
        self.requested = False
        self.number: int = signal.SIGINT
        """The first signal received."""
        self._immediate = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *ENDING_SIGNALS):
                if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
            number = taken_over()
            if number is not None:
                self.requested, self.number = True, number
        return self

    def __exit__(self, *exception: object) -> None:
        if self.requested or isinstance(exception[1], KeyboardInterrupt):  # received here or by a peer
            ignore_repeats()
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let signals raise KeyboardInterrupt within the block, which has nothing to undo."""
        self._immediate = True
        try:
            if self.requested:
                raise Stopped(number=self.number)
            yield
        finally:
            self._immediate = False
            taken_over()  # a signal not raised in the block ends the run like one outside

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if not again:
            self.number = number
        if again and number == signal.SIGINT:
            raise Stopped(number=self.number)
        if not again and self._immediate:
            raise_stopped(number, frame)
