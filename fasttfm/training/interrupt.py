"""Ctrl-C, and the SIGTERM of a cluster that wants its machine back, that never leave anything half done."""

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
    """While active, the first Ctrl-C, SIGTERM or SIGHUP sets `requested` and lets the running update finish.

    A second Ctrl-C stops at once; a second SIGTERM does not, because some senders (GNU timeout) send two. In a block
    under `at_once` the first signal raises KeyboardInterrupt, because nothing there can be left half done. SIGHUP stays
    ignored under nohup. Outside the main thread Python delivers no signals and everything stays as it is.
    """

    def __init__(self) -> None:
        self.requested = False
        self.number: int = signal.SIGINT
        """Of the first signal that came."""
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
        if self.requested or isinstance(exception[1], KeyboardInterrupt):  # of this process, or of one of its peers
            ignore_repeats()
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """The block may be stopped in the middle."""
        self._immediate = True
        try:
            yield
        finally:
            self._immediate = False
            taken_over()  # what could not be raised in the block ends the run as a signal outside does

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if not again:
            self.number = number
        if again and number == signal.SIGINT:
            raise Stopped(number=self.number)
        if not again and self._immediate:
            raise_stopped(number, frame)
