"""Ctrl-C, SIGTERM and SIGHUP stop a command at any point and are never swallowed.

Python drops exceptions that a signal raises in `__del__`, some packages drop them during imports, and llvmlite frees a
module twice if interrupted (SIGSEGV). A signal in such code is raised again a moment later, and a command that would
end normally despite a signal is reported as stopped.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fasttfm.errors import ENDING_SIGNALS, Stopped

_RETRY = 0.02  # seconds
_LLVM = f"{os.sep}llvmlite{os.sep}binding{os.sep}"
_REPEAT = 20.0
"""Seconds after a stopping SIGTERM or SIGHUP in which further ones are ignored, so that the final output is complete:
GNU timeout sends two, and a launcher signals each process in addition to the terminal."""


class _Request:
    """A pending signal that asks this process to end."""

    number: int | None = None
    stopped = -_REPEAT
    """time.monotonic() of the last signal that stopped the command."""
    command: FrameType | None = None
    """The frame that runs the command; imports in outer frames are ignored."""


_request = _Request()


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise Stopped in the block; ignored signals stay ignored.

    Has no effect outside the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        number
        for number in (signal.SIGINT, *ENDING_SIGNALS)
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    ]
    numbers += [signal.SIGALRM] if hasattr(signal, "SIGALRM") else []
    _request.number = None
    _request.stopped = -_REPEAT
    _request.command = sys._getframe(2)  # 0 is this generator, 1 is contextlib
    with _handled(numbers, _handle):
        try:
            yield
        finally:
            taken_over()
            _request.command = None


@contextmanager
def _handled(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def raise_dropped() -> None:
    """Raise Stopped if a signal is pending, so that no command ends as if there were none."""
    if _request.number is not None:
        raise Stopped(number=_request.number)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the process silently in the block; ignored signals stay ignored.

    For blocks that wait in C++ for other processes: Python handles a signal only when such a call returns, if ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in (signal.SIGINT, *ENDING_SIGNALS) if callable(signal.getsignal(number))]
    with _handled(numbers, signal.SIG_DFL):
        raise_dropped()  # the timer would raise an earlier one too late
        yield


def taken_over() -> int | None:
    """Clear and return the pending signal, which the caller then handles; None without one."""
    number, _request.number = _request.number, None
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    return number


def raise_stopped(number: int, frame: FrameType | None) -> None:
    """Raise Stopped for a signal received in `frame`; inside stoppable(), later if it is not safe to raise now."""
    if _request.command is None:  # nothing would raise it later
        raise Stopped(number=number)
    _handle(number, frame)


def ignore_repeats() -> None:
    """Ignore SIGTERM and SIGHUP for a while, because the command is already ending."""
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
    """Whether the command is in an import, in a `__del__` or in llvmlite."""
    while frame is not None and frame is not _request.command:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__" or _LLVM in code.co_filename:
            return True
        frame = frame.f_back
    return False
