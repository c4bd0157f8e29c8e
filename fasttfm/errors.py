"""What a user of the command line is meant to see: one exception, and the status of a command that was stopped."""

from __future__ import annotations

import signal

ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Besides Ctrl-C, what asks a process to end: a cluster that wants its machine back, a terminal that was closed."""


class UserError(Exception):
    """Something that the user gave cannot be used: a file, a line, an option.

    The message is one line that names what was given (file and line where there is one), what is allowed and what to
    do. `fasttfm` prints it without a traceback and exits with status 2; a program that uses the package catches it.
    """


class Stopped(KeyboardInterrupt):
    """A signal has asked the process to end: Ctrl-C, or SIGTERM and SIGHUP, which stop a command in the same way."""

    def __init__(self, message: str = "", number: int = signal.SIGINT) -> None:
        """message: one line for the user; number: of the signal."""
        super().__init__(*([message] if message else []))
        self.number = number


def is_out_of_memory(error: BaseException) -> bool:
    """MemoryError, or what torch raises in its place: OutOfMemoryError for a GPU, a plain RuntimeError for the CPU."""
    # the last: a size that not even 64 bits can count
    told = ("can't allocate memory", "not enough memory", "out of memory", "overflow")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    )


def interrupted(interrupt: KeyboardInterrupt | None = None) -> int:
    """The exit status that a shell reports for the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.

    Called where a command has caught KeyboardInterrupt; give it, because it may be Stopped.

    Where the interrupt struck code that was run from text (dataclasses and torch write some of theirs), `python -m`
    ends with the signal itself and not with the status that the command returned, although it was caught (CPython
    remembers the interrupt in run_eval_code_obj, Python/pythonrun.c). Running any other text makes it forget.
    """
    exec("")
    return 128 + (interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT)
