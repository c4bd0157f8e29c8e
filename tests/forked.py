"""Python processes that begin with torch and fasttfm loaded: forked from one server instead of started.

    run([sys.executable, "-m", "fasttfm", "env"], capture_output=True, text=True)      as subprocess.run
    Popen([sys.executable, "-c", program], stderr=PIPE)                                as subprocess.Popen

A start takes seconds, most of them for imports; a fork takes hundredths. The server is started by the first call. The
process is a child of the caller like any other: it has its own pid, signals and status. What a start itself is tested
for (imports, the working folder, limits of memory, variables that Python reads) takes `subprocess`.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import types
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
_PR_SET_CHILD_SUBREAPER = 36


class Popen(subprocess.Popen):
    """subprocess.Popen whose process is forked from the server, where the command line is Python's."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    ):  # fmt: skip
        words = [os.fsdecode(word) for word in args]
        environment = dict(os.environ if env is None else env)
        assert words[0] == sys.executable, "another program than this Python takes subprocess"
        if shell or preexec_fn or pass_fds or True in rest[1:]:
            raise ValueError("this takes subprocess")
        changed = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
        assert not {name for name in changed if name.startswith("PYTHON")} - {"PYTHONPATH"}, "this takes subprocess"
        files = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        adopt = ctypes.CDLL(None).prctl
        adopt(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the server lets go of it, and the next ancestor that asks has it
        try:
            with _ask(_server(), words[1:], os.fspath(cwd or os.getcwd()), environment, files, wait=False) as answer:
                self.pid = int(answer.makefile().readline())
        finally:
            adopt(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(command, *, input=None, capture_output=False, timeout=None, check=False, **options):
    """subprocess.run by Popen above."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def write_programs(folder: Path) -> None:
    """Write `python` and `fasttfm` into a folder for a shell's PATH: programs that the server runs as they are called.

    A signal ends the program and not what the server runs.
    """
    for name, words in (("python", []), ("fasttfm", ["-m", "fasttfm"])):
        program = folder / name
        asks = [sys.executable, "-S", "-E", __file__, "ask", _server(), str(folder / "python"), *words]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(asks)} "$@"\n')
        program.chmod(0o755)


@functools.cache
def _server() -> str:
    """The address of the server, which is started and ends with this process."""
    folder = tempfile.mkdtemp(prefix="forked-")
    address = f"{folder}/server"
    process = subprocess.Popen(
        [sys.executable, __file__, "serve", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.stdin.close()
        process.wait()
        Path(address).unlink()
        os.rmdir(folder)

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


def _serve(address: str) -> tuple[dict, list[int]]:
    """Answers until standard input is closed; returns in the processes that it forks, with what they are to run."""
    for name in LOADED:
        importlib.import_module(name)
    from fasttfm.cpu import step_passes, training_passes

    if step_passes.usable():
        training_passes.loops()
    gc.collect()
    gc.freeze()  # or a collection would copy every page
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if listener not in ready:
                sys.exit()
            with listener.accept()[0] as connection:
                head, files, _, _ = socket.recv_fds(connection, 12, 3)
                request = json.loads(connection.makefile("rb").read(int(head)))
                if _fork_twice(connection, request["wait"]):
                    return request, files
            for file in files:
                os.close(file)
            while _ended_one():
                pass


def _fork_twice(connection: socket.socket, wait: bool) -> bool:
    """True in the new process. The one between them ends, so that the caller is its parent, or waits for it."""
    between = os.fork()
    if between:
        if not wait:
            os.waitpid(between, 0)
            connection.sendall(b"\n")
        return False
    between = os.getpid()
    child = os.fork()
    if not child:
        while not wait and os.getppid() == between:
            time.sleep(0.001)
        return True
    connection.sendall(b"%d" % child)
    if wait:
        connection.sendall(b" %d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def _ended_one() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _become(request: dict, files: list[int]) -> None:
    """What Python does before the first line of a program."""
    for own, given in enumerate(files):
        os.dup2(given, own)
        os.close(given)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():
        import torch

        torch.set_num_threads(int(threads))
    sys.executable = request.get("executable", sys.executable)
    words = request["words"]
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


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        _, _, address, executable, *words = sys.argv
        # not the parent of what the server forks
        environment = {name: value for name, value in os.environ.items() if name != "FASTTFM_PARENT"}
        with _ask(address, words, os.getcwd(), environment, [0, 1, 2], wait=True, executable=executable) as answer:
            status = int(answer.makefile().readline().split()[1])
        sys.exit(128 - status if status < 0 else status)
    sys.path.insert(1, str(ROOT))
    _become(*_serve(sys.argv[2]))
