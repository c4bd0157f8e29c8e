"""Processes that a command starts: nothing of the working folder is imported there, and they end with the command.

`python -m` and `python -c` look for modules in the working folder first, where a user may have a sentencepiece.py.
A child therefore takes over its parent's sys.path before it imports anything. The command lines of all children of the
package are made here.

Signals are passed on to what runs, which is waited for (run_to_end). A process that is killed can pass nothing on: its
Python children ask Linux to be told (child_environment, end_with_parent).
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
"""Seconds between two questions of run_to_end()."""


def calling(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command line of a process that calls function(*arguments) and ends with the status that it returns.

    function: of a module that can be imported by its name. arguments: numbers, strings, and lists of them.
    """
    return _line(function.__module__, function.__name__, arguments)


def command_line(*words: str, started: float | None = None) -> list[str]:
    """The command line of `fasttfm WORDS`; started: by time.monotonic(), of the command that it is a part of."""
    return [*_line("fasttfm.__main__", "command", () if started is None else (started,)), *words]


def _line(module: str, name: str, arguments: tuple[Any, ...]) -> list[str]:
    path = [os.fspath(entry) for entry in sys.path]
    return [sys.executable, "-c", _CALL.format(path=path, module=module, name=name, arguments=arguments)]


PARENT = "FASTTFM_PARENT"
"""Environment variable that tells a child the process id of its parent."""
_PR_SET_PDEATHSIG = 1


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a child that is to call end_with_parent(): without it, its own children would end themselves.

    The thread that starts the child must outlive it.
    """
    return {**environment, PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Have this process ended by SIGTERM, which saves what there is to save, when the one that runs it is killed.

    For a process with child_environment(), or one of multiprocessing. On Linux alone; elsewhere nothing happens.
    """
    starter = multiprocessing.parent_process()
    parent = os.environ.pop(PARENT, "") if starter is None else str(starter.pid)
    if sys.platform == "linux" and parent.isdecimal():
        ask_for_parents_end()
        if os.getppid() != int(parent):  # it was killed before
            os.kill(os.getpid(), signal.SIGTERM)


def ask_for_parents_end() -> None:
    """Have SIGTERM sent to this process when its parent ends, by Linux; as preexec_fn, for programs of others too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_to_end(
    command: list[str], *, input: Any = None, until: Callable[[], bool] | None = None, **options: Any
) -> subprocess.CompletedProcess:
    """Run a command as subprocess.run does; options: of subprocess.Popen.

    until: asked a few times a second; when it says so the command gets SIGTERM.

    Ctrl-C, SIGTERM and SIGHUP that come meanwhile are passed on to it. However long it takes to end, it is waited for:
    it may have something to save. What it leaves running is killed then, and Stopped is raised, whatever its status.
    Ctrl-Z stops it too, with all that it has started, until this process goes on. Outside the main thread Python
    delivers no signals.
    """
    raise_dropped()
    process: subprocess.Popen | None = None
    asked: list[int] = []
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
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
                os.killpg(process.pid, number)  # it leads a session, and so a group

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *ENDING_SIGNALS):
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, pass_on)
        if hasattr(signal, "SIGTSTP") and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, pause)
    try:
        # a session of its own: a terminal would send Ctrl-C to both, and of two the second stops training at once
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
    finally:
        if asked:
            ignore_repeats()
            signal_group(signal.SIGKILL)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if asked:
        raise Stopped(number=asked[0])
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def signal_name(number: int) -> str:
    """Such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
