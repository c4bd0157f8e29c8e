"""Child processes: import nothing from the working folder, forward signals, and end with their parent.

`python -m` and `python -c` search the working folder first, where a user may have a sentencepiece.py, so a child sets
its parent's sys.path before importing anything. run_to_end() forwards signals to the child and waits for it. If the
parent is killed, Linux signals its Python children (child_environment, end_with_parent).
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from fasttfm.errors import ENDING_SIGNALS, Stopped
from fasttfm.system.signals import ignore_repeats, raise_dropped

_CALL = "import sys; sys.path[:] = {path!r}; from {module} import {name}; sys.exit({name}(*{arguments!r}))"


_INTERVAL = 0.2
"""Polling interval of run_to_end() in seconds."""


def calling(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command line of a process that calls function(*arguments) and exits with its result.

    function: a module-level function. arguments: numbers, strings, and lists of them.
    """
    return _line(function.__module__, function.__name__, arguments)


def command_line(*words: str, started: float | None = None) -> list[str]:
    """The command line of `fasttfm WORDS`. started: time.monotonic() at the start of the enclosing command."""
    return [*_line("fasttfm.__main__", "command", () if started is None else (started,)), *words]


def _line(module: str, name: str, arguments: tuple[Any, ...]) -> list[str]:
    path = [os.fspath(entry) for entry in sys.path]
    return [sys.executable, "-c", _CALL.format(path=path, module=module, name=name, arguments=arguments)]


PARENT = "FASTTFM_PARENT"
"""Environment variable with the process id of the parent."""
_PR_SET_PDEATHSIG = 1


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a child that calls end_with_parent(); the thread that starts the child must outlive it."""
    return {**environment, PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Receive SIGTERM, which saves state and ends the process, when the parent is killed; Linux only.

    For a process with child_environment(), one of multiprocessing, or a rank of torchrun: a launcher that is stopped
    while it starts a rank does not know it, and the rank would wait for the others.
    """
    starter = multiprocessing.parent_process()
    # popped, so that this process's own children do not end themselves
    parent = os.environ.pop(PARENT, "") if starter is None else str(starter.pid)
    if not parent and "TORCHELASTIC_RUN_ID" in os.environ:
        parent = str(os.getppid())
    if sys.platform == "linux" and parent.isdecimal():
        terminate_on_parent_death()
        if os.getppid() != int(parent):  # it was killed before
            os.kill(os.getpid(), signal.SIGTERM)


def terminate_on_parent_death() -> None:
    """Have Linux send SIGTERM to this process when its parent ends; also a preexec_fn for other programs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_to_end(
    command: list[str], *, input: Any = None, until: Callable[[], bool] | None = None, **options: Any
) -> subprocess.CompletedProcess:
    """Run a command as subprocess.run does. options: of subprocess.Popen.

    until: polled a few times a second; once it returns True the command gets SIGTERM.

    Forwards Ctrl-C, SIGTERM and SIGHUP, waits for the command however long it takes (it may be saving), kills its
    remaining processes, and raises Stopped whatever its status. Ctrl-Z suspends the command and its processes until
    this process continues. Outside the main thread Python delivers no signals.
    """
    raise_dropped()
    process: subprocess.Popen | None = None
    received: list[int] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    def pause(number: int, frame: FrameType | None) -> None:
        signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        signal_group(signal.SIGCONT)

    def signal_group(number: int) -> None:
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)  # it leads a session, hence a group

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *ENDING_SIGNALS):
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, forward)
        if hasattr(signal, "SIGTSTP") and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, pause)
    try:
        # in its own session: a terminal would send Ctrl-C to both, and a second Ctrl-C stops training at once
        if input is not None:
            options["stdin"] = subprocess.PIPE
        process = subprocess.Popen(command, start_new_session=True, **options)
        for number in early:
            process.send_signal(number)
        while True:
            try:
                output, errors = process.communicate(input, timeout=None if until is None else _INTERVAL)
                break
            except subprocess.TimeoutExpired:
                if until is not None and until():
                    process.terminate()
                    until = None
    except BaseException:  # of until()
        signal_group(signal.SIGKILL)
        if process is not None:
            process.wait()
        raise
    finally:
        if received:
            ignore_repeats()
            signal_group(signal.SIGKILL)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        raise Stopped(number=received[0])
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
