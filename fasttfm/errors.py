"""Messages that a user is meant to see: the exceptions of the package, and the status of a command that was stopped."""

import errno
import importlib
import signal
from typing import Any

ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Besides Ctrl-C, what asks a process to end: a cluster that wants its machine back, a terminal that was closed."""
LOST_PEER = 75
"""Exit status of a rank that ends because another one has; that one has said why."""


class UserError(Exception):
    """Raised for what the user gave and can correct: a file, a line, an option.

    The message is one line that names what was given (file and line where there is one), what is allowed and what to
    do. `fasttfm` prints it without a traceback and exits with status 2; a program that uses the package catches it.
    """


def optional(module: str, extra: str) -> Any:
    """The imported module of a package that one of fasttfm's extras brings; UserError where it cannot be imported."""
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise UserError(f'{package} is not installed: pip install "./fasttfm[{extra}]"') from None
        why = str(error).split("\n")[0]
        raise UserError(f'{package} cannot be imported ({why}): pip install --upgrade "./fasttfm[{extra}]"') from None


class ArgumentError(ValueError, AssertionError, RuntimeError):
    """Raised for a value or a shape that a module cannot take.

    torch.nn raises AssertionError in one place and RuntimeError in the next; this is both, and the ValueError that it
    should have been, so that code written for torch.nn keeps catching it.
    """


class ArgumentTypeError(TypeError, AssertionError, RuntimeError):
    """Raised for a dtype that a module cannot take; also the class that torch.nn raises."""


class Stopped(KeyboardInterrupt):
    """Raised when a signal stops the process: Ctrl-C, SIGTERM or SIGHUP."""

    def __init__(self, message: str = "", number: int = signal.SIGINT) -> None:
        """message: one line for the user; number: of the signal."""
        super().__init__(*([message] if message else []))
        self.number = number


_OUT_OF_MEMORY = (
    "allocate memory",
    "not enough memory",
    "out of memory",
    "overflow",  # a size that not even 64 bits can count
    "bad_alloc",
    "start new thread",  # a thread's stack did not fit
    "could not create a primitive",  # oneDNN's code did not fit
    "could not create a memory",
    "failed to map segment",  # a library did not fit
    "mmap",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means out of memory: MemoryError, or what torch, its libraries or the loader raise."""
    if isinstance(error, UserError):
        return False
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    kinds = (RuntimeError, ImportError, SystemError, OSError)
    raised = isinstance(error, kinds) or type(error).__name__ == "SafetensorError"
    return raised and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def interrupted(interrupt: KeyboardInterrupt | None = None) -> int:
    """The exit status that a shell reports for the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.

    Called where a command has caught KeyboardInterrupt; give it, because it may be Stopped.

    Where the interrupt struck code that was run from text (dataclasses and torch write some of theirs), `python -m`
    ends with the signal itself and not with the status that the command returned, although it was caught (CPython
    remembers the interrupt in run_eval_code_obj, Python/pythonrun.c). Running any other text makes it forget.
    """
    exec("")
    return 128 + (interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT)
