"""Shared parts of the benchmark programs: arguments, subprocesses, the record, the exit status."""

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
    """Parser for `python -m MODULE` with --results; the first line of the docstring is its description."""
    result = Parser(prog=f"python -m {module}", description=(docstring or "").split("\n")[0])
    result.add_argument("--results", type=Path, default=RESULTS, help="folder for the record (default: %(default)s)")
    return result


def keep(results: Path, benchmark: str, *, key: Callable[[Record], Any] | None = None, **fields: Any) -> Record:
    """Writes a record of these fields and the machine to the benchmark's file in `results`, and returns it.

    The record replaces those with an equal key(record); without key it is appended.
    """
    record = {"benchmark": benchmark, **fields, "machine": machine.describe()}
    file = results / f"{benchmark.replace('_', '-')}.jsonl"
    if key is None:
        records.append(file, record)
    else:
        records.write(file, [record], key)
    return record


def writable(folder: Path, flag: str = "--out") -> None:
    """Raises UserError if the folder cannot be written to; call it before measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{flag} {folder} cannot be written to ({error.strerror}): name another folder") from error


def python(*words: object) -> str:
    """Output of `python -m WORDS` with its default number of threads. Raises SystemExit if it fails.

    The program must call end_with_parent().
    """
    environment = child_environment()
    environment.pop("OMP_NUM_THREADS", None)
    line = [sys.executable, "-m", *map(str, words)]
    done = run_to_end(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"benchmarks: {' '.join(line)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


AT_ITS_LIMIT = (124, -signal.SIGKILL)
"""Exit statuses of limited() for a command that was stopped."""
_GRACE = 10
"""Seconds between SIGTERM at the limit and SIGKILL."""


def limited(
    words: Sequence[str], seconds: float, environment: Mapping[str, str], output: Path,
    run: Callable[..., Any] = run_to_end,
) -> Any:  # fmt: skip
    """run() of a command in this checkout with a time limit; its output goes to a file.

    run: subprocess.Popen, if the caller waits for the command or terminates it. The command ends with this process.
    `timeout` is its parent, so the environment must not be child_environment().
    """
    line = ["timeout", f"--kill-after={_GRACE}", f"{seconds:.1f}", *words]
    with output.open("wb") as sink:
        streams = {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": subprocess.STDOUT}
        return run(line, env=environment, cwd=machine.ROOT, preexec_fn=terminate_on_parent_death, **streams)


def run(main: Callable[[Sequence[str] | None], int], arguments: Sequence[str] | None = None) -> int:
    """Run main(arguments) and return its exit status; a UserError or a missing package prints one line and returns 2.

    Ctrl-C, SIGTERM and SIGHUP run every `finally` block and end all child processes.
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
        except ModuleNotFoundError as error:  # measure/__init__.py checks the other packages
            if error.name != "ptx_check":
                raise
            print("benchmarks: ptx_check is not installed: pip install ./fasttfm/ptx-check", file=sys.stderr)
            return 2
        except BrokenPipeError:  # reader (head, less) closed the pipe; avoids a second error at interpreter exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE
        except KeyboardInterrupt as interrupt:
            status = interrupted(interrupt)
            how = "interrupted" if status == 128 + signal.SIGINT else f"stopped by {signal_name(status - 128)}"
            print(f"benchmarks: {how}; finished cases are kept", file=sys.stderr)
            return status
