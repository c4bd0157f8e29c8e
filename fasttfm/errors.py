"""Exceptions with messages for the user, and the exit status of a stopped command."""

import errno
import importlib
import signal
from typing import Any

ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals besides Ctrl-C that ask a process to end: from a cluster's scheduler, or from a closed terminal."""
LOST_PEER = 75
"""Exit status of a rank that ends because another rank failed and printed the reason."""


class UserError(Exception):
    """Invalid input, or a resource limit, that the user can correct: a file, a line, an option.

    The message is one line: the input (with file and line), what is allowed, and what to do. `fasttfm` prints it
    without a traceback and exits with status 2.
    """


def optional(module: str, extra: str) -> Any:
    """Import a module of an optional dependency; UserError with the extra to install if that fails."""
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise UserError(f'{package} is not installed: pip install "./fasttfm[{extra}]"') from None
        reason = str(error).split("\n")[0]
        raise UserError(
            f'{package} cannot be imported ({reason}): pip install --upgrade "./fasttfm[{extra}]"'
        ) from None


class ArgumentError(ValueError, AssertionError, RuntimeError):
    """Unsupported value or shape of an argument of a module.

    torch.nn raises AssertionError in some places and RuntimeError in others; this class derives from both, and from
    ValueError, so that code written for torch.nn still catches it.
    """


class ArgumentTypeError(TypeError, AssertionError, RuntimeError):
    """Unsupported dtype of an argument of a module; derives from the classes that torch.nn raises."""


class Stopped(KeyboardInterrupt):
    """Raised when a signal stops the process: Ctrl-C, SIGTERM or SIGHUP."""

    def __init__(self, message: str = "", number: int = signal.SIGINT) -> None:
        """message: one line for the user. number: the signal."""
        super().__init__(*([message] if message else []))
        self.number = number


_OUT_OF_MEMORY = (
    "allocate memory",
    "not enough memory",
    "out of memory",
    "calculation overflowed",  # a size of more than 64 bits
    "multiplication overflow",
    "bad_alloc",
    "start new thread",  # no memory for its stack
    "could not create a primitive",  # no memory for oneDNN's code
    "could not create a memory",
    "failed to map segment",  # no memory for a library
    "mmap",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory: MemoryError, or an error from torch, its libraries or the loader."""
    if isinstance(error, UserError):
        return False
    if isinstance(error, OSError) and error.errno is not None:  # its text may name a path with any word in it
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return True
    kinds = (RuntimeError, ImportError, SystemError, OSError)
    raised = isinstance(error, kinds) or type(error).__name__ == "SafetensorError"
    return raised and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def interrupted(interrupt: KeyboardInterrupt | None = None) -> int:
    """The exit status for a caught interrupt: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.

    If the interrupt hit code compiled from a string (dataclasses and torch generate some), `python -m` ends with the
    signal instead of the returned status, although the exception was caught: CPython remembers the interrupt in
    run_eval_code_obj (Python/pythonrun.c). Executing any other string clears that.
    """
    exec("")
    return 128 + (interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT)
