"""Python processes that begin with torch and fasttfm loaded: forked from one server instead of started.

    run([sys.executable, "-m", "fasttfm", "env"], capture_output=True, text=True)      as subprocess.run
    Popen([sys.executable, "-c", program], stderr=PIPE)                                as subprocess.Popen

A start takes seconds, most of them for imports; a fork takes hundredths. The server is started by the first call. The
process is a child of the caller like any other: it has its own pid, signals and status. What a start itself is tested
for (imports, the working folder, limits of memory, variables that Python reads) takes `subprocess`.

With FORKED_CHILDREN in its environment, what a forked program starts is forked too, by a server of its own.
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "fasttfm.__main__",
    "fasttfm.cli.train",
    "fasttfm.cli.translate",
    "fasttfm.training.run",
)
"""Modules that the server imports, beside the loops that numba compiles."""
TRAINING = (*LOADED, "torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.PngImagePlugin")
"""Those that every training run imports too, of which one decides by the environment that it finds: Triton."""
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15
_SERVER = "fork-server"
"""The name that /proc/PID/comm has of a forked program's own server."""


class Popen(subprocess.Popen):
    """subprocess.Popen whose process is forked from the server, where the command line is Python's."""

    loaded = LOADED

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    ):  # fmt: skip
        words = [os.fsdecode(word) for word in args]
        environment = dict(os.environ if env is None else env)
        assert words[0] == sys.executable, "another program than this Python takes subprocess"
        *others, session = rest[1:6]
        if shell or preexec_fn or True in others:
            raise ValueError("this takes subprocess")
        changed = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
        assert not {name for name in changed if name.startswith("PYTHON")} - {"PYTHONPATH"}, "this takes subprocess"
        files = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        more = {"numbers": [0, 1, 2, *pass_fds], "session": session}
        adopt = ctypes.CDLL(None).prctl
        adopt(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the server lets go of it, and the next ancestor that asks has it
        try:
            place = os.fspath(cwd or os.getcwd())
            with _ask(_server(self.loaded), words[1:], place, environment, [*files, *pass_fds], **more) as answer:
                self.pid = int(answer.makefile().readline())
        finally:
            adopt(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def children_of(pid: int) -> list[int]:
    """The processes that one has started and that live, in that order, without its own server."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if Path(f"/proc/{child}/comm").read_text().strip() != _SERVER]


class TrainingPopen(Popen):
    """Popen for runs that train, with what they import."""

    loaded = TRAINING


class BarePopen(Popen):
    """Popen for runs of a copy of this project: nothing of the project is loaded."""

    loaded = ("torch", "numba", "hypothesis", "pytest")


SUBPROCESS = types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen})
"""The module subprocess, for one whose processes are to be forked."""


def forked_children() -> dict[str, str]:
    """The environment of a forked program that is to fork what it starts."""
    return {**os.environ, "FORKED_CHILDREN": "1"}


def run(command, *, input=None, capture_output=False, timeout=None, check=False, popen=Popen, **options):
    """subprocess.run by Popen above, or another of them."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with popen(command, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


@functools.cache
def _server(loaded: tuple[str, ...]) -> str:
    """The address of the server with these modules, which is started and ends with this process."""
    folder = tempfile.mkdtemp(prefix="forked-")
    address = f"{folder}/server"
    words = [sys.executable, __file__, "serve", address, *loaded]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.stdin.close()
        process.wait()

    atexit.register(end)
    return address


def _ask(address: str, words: list, cwd: str, environment: dict, files: list[int], **more: Any) -> socket.socket:
    """A connection to the server on which it answers."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps({"words": words, "cwd": cwd, "environment": environment, **more}).encode("ascii")
    socket.send_fds(connection, [b"%12d" % len(request)], files)
    connection.sendall(request)
    return connection


def fork_own_children() -> None:
    """Have what this forked process starts forked as it is now, by a server of its own.

    That is the ranks of torchrun's launcher, the commands of a recipe and the first process of fasttfm's workers.
    """
    own = _fork_server()
    globals()["_server"] = lambda loaded: own
    launcher = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    importlib.import_module(launcher).Popen = Popen
    for name in ("fasttfm.system.children", "fasttfm.system.processes"):
        importlib.import_module(name).subprocess = SUBPROCESS


def load(names: Sequence[str]) -> None:
    """Import what every process needs, and of the project the loops that numba compiles."""
    for name in names:
        importlib.import_module(name)
    if not any(name.startswith("fasttfm") for name in names):
        return
    from fasttfm.cpu import step_passes, training_passes

    if step_passes.usable():
        from compiled_once import compile_once_from_now_on

        compile_once_from_now_on()
        training_passes.loops("training_loops")
    gc.collect()
    gc.freeze()  # or a collection would copy every page


def _serve(address: str, ready_on: int = 1) -> tuple[dict, list[int]]:
    """Answers until standard input is closed; returns in the processes that it forks, with what they are to run."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(ready_on, b"ready\n")
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if listener not in ready:
                shutil.rmtree(Path(address).parent, ignore_errors=True)  # what was imported may have written there
                os._exit(0)
            with listener.accept()[0] as connection:
                head, files, _, _ = socket.recv_fds(connection, 12, 64)
                request = json.loads(connection.makefile("rb").read(int(head)))
                if _fork_twice(connection):
                    return request, files
            for file in files:
                os.close(file)


def _fork_twice(connection: socket.socket) -> bool:
    """True in the new process. The one between them ends, so that the caller is its parent."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        connection.sendall(b"\n")
        return False
    between = os.getpid()
    child = os.fork()
    if not child:
        while os.getppid() == between:
            time.sleep(0.001)
        return True
    connection.sendall(b"%d" % child)
    os._exit(0)


def _become(request: dict, files: list[int]) -> None:
    """What Python does before the first line of a program."""
    if request.get("session"):
        os.setsid()
    held = [fcntl.fcntl(given, fcntl.F_DUPFD, 512) for given in files]  # beyond all numbers that they are to have
    for given in files:
        os.close(given)
    for own, given in zip(request["numbers"], held):
        os.dup2(given, own)
        os.close(given)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():
        import torch

        torch.set_num_threads(int(threads))
    if "FORKED_CHILDREN" in os.environ:
        fork_own_children()
    words = request["words"]
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)
    sys.orig_argv[:] = [sys.executable, *words]
    first = {"-c": "", "-m": request["cwd"]}.get(words[0], str(Path(words[0]).resolve().parent))
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *named, *(entry for entry in sys.path[1:] if entry not in named)]
    sys.argv[:] = words[1:] if words[0] in ("-c", "-m") else words
    if words[0] == "-m":
        for name in (sys.argv[0], f"{sys.argv[0]}.__main__"):
            if not hasattr(sys.modules.get(name), "__path__"):  # no package
                sys.modules.pop(name, None)  # or runpy would warn that it was imported before
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[0] = "-c"
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _fork_server() -> str:
    """The address of a server for this process, of whom its processes are children; it ends with this one."""
    address = f"{tempfile.mkdtemp(prefix='forked-')}/server"
    ended, kept = os.pipe()  # the other end is closed when this process has ended, however it does
    ready, tell = os.pipe()
    if os.fork():
        os.close(ended)
        os.close(tell)
        assert os.read(ready, 6) == b"ready\n"
        os.close(ready)
        return address
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, _SERVER.encode(), 0, 0, 0)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of a group's, those to the program are not to it
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # a new process has its handlers before it gets one
    nothing = os.open(os.devnull, os.O_RDWR)
    for own, given in enumerate((ended, nothing, nothing)):
        os.dup2(given, own)
    for given in (ended, kept, ready, nothing):
        os.close(given)
    request = _serve(address, tell)
    os.close(tell)
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    prctl(_PR_SET_NAME, b"python", 0, 0, 0)
    _become(*request)
    sys.exit()


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    load(sys.argv[3:])
    _become(*_serve(sys.argv[2]))
