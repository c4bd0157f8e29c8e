"""Ctrl-C, SIGTERM and SIGHUP: noticed at any moment of a command, and never swallowed.

Python drops exceptions that a signal raises in `__del__`, some packages drop them during imports, and llvmlite frees a
module twice when one strikes it (SIGSEGV). A signal in such code is raised again a moment later, and a command that
would end as if nothing had happened is reported as stopped.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fasttfm.errors import ENDING_SIGNALS, Stopped

_RETRY = 0.02  # seconds
_LLVM = f"{os.sep}llvmlite{os.sep}binding{os.sep}"
_REPEAT = 20.0
"""Seconds after a SIGTERM or SIGHUP that stops a command in which another one means no more than the first: GNU timeout
sends two, a launcher one to each process beside that of the terminal. It must not cut the command's last words."""


class _Request:
    """The signal that has asked this process to end, until somebody acts on it."""

    number: int | None = None
    stopped = -_REPEAT
    """Time of the last signal that ends the command, by time.monotonic()."""
    command: FrameType | None = None
    """The frame that runs the command: what is being imported further out is not its business."""


_request = _Request()


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise Stopped in the block, behind every `finally`; a signal ignored so far stays so.

    Outside the main thread Python delivers no signals and everything stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(ENDING_SIGNALS, signal.SIG_DFL)}
    previous: dict[int, Any] = {n: handler for n, handler in ours.items() if signal.getsignal(n) == handler}
    if hasattr(signal, "SIGALRM"):
        previous[signal.SIGALRM] = signal.getsignal(signal.SIGALRM)
    _request.number = None
    _request.stopped = -_REPEAT
    _request.command = sys._getframe(2)  # 0 is this generator, 1 is contextlib
    for number in previous:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        taken_over()
        _request.command = None
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_dropped() -> None:
    """Raise Stopped where a signal has come that nobody has acted on, so that no command ends as if it had not."""
    if _request.number is not None:
        raise Stopped(number=_request.number)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the process in the block, silently; a signal ignored so far stays so.

    For a block that waits in C++ for other processes: Python acts on a signal only when such a call returns, which it
    may never do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING_SIGNALS)}
    previous = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in previous:
            signal.signal(number, signal.SIG_DFL)
        raise_dropped()  # one that came before, which a timer would raise again too late
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def taken_over() -> int | None:
    """The number of a signal that has come and was not raised yet, which is the caller's business from now on."""
    number, _request.number = _request.number, None
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    return number


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """Raise Stopped for a signal that struck in frame; under stoppable() a moment later where nothing may be raised."""
    if _request.command is None:  # nobody would raise it later
        raise Stopped(number=number)
    _handle(number, frame)


def ignore_repeats() -> None:
    """The command ends because of a signal or a lost peer: SIGTERM and SIGHUP that follow soon are not raised."""
    _request.stopped = time.monotonic()


def _handle(number: int, frame: FrameType | None) -> None:
    is_retry = number == getattr(signal, "SIGALRM", None)
    if is_retry and _request.number is None:
        return
    if number in ENDING_SIGNALS and time.monotonic() < _request.stopped + _REPEAT:
        return
    is_second_interrupt = number == signal.SIGINT and _request.number is not None
    if not is_retry and _request.number is None:
        _request.number = number
    assert _request.number is not None
    if hasattr(signal, "setitimer") and not is_second_interrupt and _must_not_raise(frame):
        signal.setitimer(signal.ITIMER_REAL, _RETRY)
        return
    ignore_repeats()
    raise Stopped(number=_request.number)


def _must_not_raise(frame: FrameType | None) -> bool:
    """Return whether the command is in an import, in a `__del__` or in llvmlite."""
    while frame is not None and frame is not _request.command:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__":
            return True
        if _LLVM in code.co_filename:
            return True
        frame = frame.f_back
    return False
