"""Begin and end of a benchmark's program: its flags, the fasttfm commands it runs, its record, its exit status."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, records
from benchmarks.measure.records import RESULTS, Record
from fasttfm.cli.main import EXIT_BROKEN_PIPE
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError, interrupted
from fasttfm.system.children import (
    child_environment,
    end_with_parent,
    run_to_end,
    signal_name,
    terminate_on_parent_death,
)
from fasttfm.system.signals import raise_dropped, stoppable


def parser(module: str, docstring: str | None) -> Parser:
    """The parser of `python -m MODULE`, which says the first line of its docstring, with --results."""
    result = Parser(prog=f"python -m {module}", description=(docstring or "").split("\n")[0])
    result.add_argument("--results", type=Path, default=RESULTS, help="folder that keeps the record")
    return result


def split(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The arguments before --, and those after it, which go to another program; None: this process's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def keep(results: Path, benchmark: str, *, key: Callable[[Record], Any] | None = None, **fields: Any) -> Record:
    """Puts a record of these fields and the machine into the file of a benchmark in a folder; returns it.

    key: what tells records apart, of which the new one replaces the old; None: it is appended.
    """
    record = {"benchmark": benchmark, **fields, "machine": machine.describe()}
    file = results / f"{benchmark.replace('_', '-')}.jsonl"
    if key is None:
        records.append(file, record)
    else:
        records.write(file, [record], key)
    return record


def writable(folder: Path, flag: str = "--out") -> None:
    """Raises UserError where no record could be kept, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{flag} {folder} cannot be written to ({error.strerror}): name another folder") from error


def python(*words: object) -> str:
    """Return what `python -m WORDS` prints, with the threads it takes by itself; SystemExit with its complaint.

    The program calls end_with_parent().
    """
    environment = child_environment()
    environment.pop("OMP_NUM_THREADS", None)
    line = [sys.executable, "-m", *map(str, words)]
    done = run_to_end(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"benchmarks: {' '.join(line)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


AT_ITS_LIMIT = (124, -signal.SIGKILL)
"""The statuses of limited() for a command that was stopped."""
_GRACE = 10
"""Seconds that a command has to write what it found, when its limit has come."""


def limited(words: Sequence[str], seconds: float, environment: Mapping[str, str], output: Path) -> int:
    """Runs a command in this checkout for at most so many seconds, its output in a file. Returns its status.

    It ends with this process, which is not its parent: environment without child_environment()'s.
    """
    line = ["timeout", f"--kill-after={_GRACE}", f"{seconds:.1f}", *words]
    with output.open("wb") as sink:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": subprocess.STDOUT}
        options["preexec_fn"] = terminate_on_parent_death
        return run_to_end(line, env=environment, cwd=machine.ROOT, **options).returncode


def run(main: Callable[[Sequence[str] | None], int], arguments: Sequence[str] | None = None) -> int:
    """main(arguments): its status; 2 with the message on stderr for what the user must change or install.

    Ctrl-C, SIGTERM and SIGHUP end it behind every `finally`, with all that it has started.
    """
    end_with_parent()
    with stoppable():
        try:
            status = main(arguments)
            sys.stdout.flush()
            raise_dropped()
            return status
        except UserError as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 2
        except ModuleNotFoundError as error:  # those of other packages: measure/__init__.py
            if error.name != "ptx_check":
                raise
            print("benchmarks: ptx_check is not installed: pip install ./fasttfm/ptx-check", file=sys.stderr)
            return 2
        except BrokenPipeError:  # the reader (head, less) has gone; Python would complain once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE
        except KeyboardInterrupt as interrupt:
            status = interrupted(interrupt)
            how = "interrupted" if status == 128 + signal.SIGINT else f"stopped by {signal_name(status - 128)}"
            print(f"benchmarks: {how}; the cases before this one are kept", file=sys.stderr)
            return status
