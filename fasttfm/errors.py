"""What a user of the command line is meant to see: one exception, and the status of a command stopped by Ctrl-C."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user gave cannot be used: a file, a line, an option.

    The message is one line that names what was given (file and line where there is one), what is allowed and what to
    do. `fasttfm` prints it without a traceback and exits with status 2; a program that uses the package catches it.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """MemoryError, or what torch raises in its place: OutOfMemoryError for a GPU, a plain RuntimeError for the CPU."""
    # the last: a size that not even 64 bits can count
    told = ("can't allocate memory", "not enough memory", "out of memory", "overflow")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    )


def interrupted() -> int:
    """130, the exit status that a shell reports for SIGINT; called where a command has caught KeyboardInterrupt.

    Where the interrupt struck code that was run from text (dataclasses and torch write some of theirs), `python -m`
    ends with the signal itself and not with the status that the command returned, although it was caught (CPython
    remembers the interrupt in run_eval_code_obj, Python/pythonrun.c). Running any other text makes it forget.
    """
    exec("")
    return 130
