"""Runs of `fasttfm train` by several ranks, forked from one process so that torch is loaded once for all tests.

    echo '{"errors": "FILE", "runs": [{"size": 2, "words": ["train", ...], "fault": null}, ...]}' | python ranks.py

Answers each line by a JSON list: of each run the exit statuses of its ranks, and the passes compiled by numba that they
have entered; with "numba": false it is as if numba were not installed. Passes are entered however small a batch is.
What the ranks write to standard error goes to the file.

A fault is [rank, update, kind]: before its update's step the rank raises a UserError, hangs until rank 0 ends, is
killed, or gets a signal, by kind "error", "hang", "SIGKILL" or "SIGTERM"; with "nan" the loss of its part of the
update is no number; with "validation" it gets a SIGTERM in that validation (they count from 1).
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fasttfm.cpu import training_passes
from fasttfm.cpu.step_passes import usable

sys.path.insert(0, str(Path(__file__).parents[1]))
import forked
from numba_passes import passes_entered
from waiting import free_port

PASSES = {"residual_layer_norm"}
"""What training any Transformer enters with numba: while it validates, as a gradient without dropout is torch's."""


def run_ranks(*runs: dict, numba: bool = True) -> tuple[list[list[int]], str]:
    """The exit statuses of each run's ranks, and all that was written to standard error.

    Every run that succeeds must have entered the passes compiled by numba, and without numba must not have entered
    any.
    """
    with tempfile.NamedTemporaryFile("r") as errors:
        request = {"errors": errors.name, "runs": [{"numba": numba, **run} for run in runs]}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            print(json.dumps(request), file=server.stdin, flush=True)
            results = json.loads(server.stdout.readline())
        except BaseException:  # pytest's limit of time, for one
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise
        told = errors.read()
    for statuses, entered in results:
        if not any(statuses):
            assert (set(entered) >= PASSES) if numba and usable() else not entered, entered
    return [statuses for statuses, _ in results], told


@functools.cache
def _server() -> subprocess.Popen:
    """The process that forks the ranks; it ends with this one."""
    words = [sys.executable, str(Path(__file__))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = forked.TrainingPopen(words, **pipes, start_new_session=True)
    assert server.stdin is not None
    atexit.register(server.stdin.close)
    return server


def _inject(fault: list | None, rank: int, first: int) -> None:
    """first: the process of rank 0."""
    from fasttfm.training.optimization import Optimization
    from fasttfm.training.translation import Validator
    from fasttfm.training.updates import Updates

    if fault is None or fault[0] != rank:
        return
    _, update, kind = fault
    if kind == "nan":
        loss = Updates.loss
        Updates.loss = lambda self, batch: tuple(  # type: ignore[method-assign]
            value * float("nan") if self.position.step == update - 1 else value for value in loss(self, batch)
        )
    elif kind == "validation":
        _before_call(Validator, "part", update, lambda: os.kill(os.getpid(), signal.SIGTERM))
    else:
        _before_call(Optimization, "step", update, lambda: _fail(kind, first))


def _before_call(owner: type, name: str, number: int, act: Callable[[], None]) -> None:
    original, calls = getattr(owner, name), itertools.count(1)

    def call(*given, **options):
        if next(calls) == number:
            act()
        return original(*given, **options)

    setattr(owner, name, call)


def _fail(kind: str, first: int) -> None:
    from fasttfm.errors import UserError

    if kind == "error":
        raise UserError("this rank has met a wall")
    if kind != "hang":
        os.kill(os.getpid(), signal.Signals[kind])
        return
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(first, 0)
            time.sleep(0.1)
    os._exit(0)


def _exchange_in(bucket: int) -> None:
    """Let gradients be exchanged in buckets of so many, at least."""
    from fasttfm.training import exchange

    exchange.GradientExchange.__init__.__defaults__ = (bucket,)  # type: ignore[attr-defined]


def _run(
    size: int, words: list[str], fault: list | None = None, bucket: int = 0, *, numba: bool = True, errors: int = 2
) -> tuple[list[int], list[str]]:
    entered = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (the ranks write to it)
    port, children = free_port(), []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ.update({name: str(number) for name, number in ranks.items()})
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
            if size == 1:
                del os.environ["WORLD_SIZE"]
            passes_entered(numba, lambda name: os.write(entered.fileno(), f"{name}\n".encode()))
            training_passes.PASS_ELEMENTS = 1
            if "--subword-sampling" in words:
                forked.fork_own_children()  # the process that draws
            _inject(fault, rank, children[0] if rank else os.getpid())
            if bucket:
                _exchange_in(bucket)
            sys.argv = ["fasttfm", *words]
            os.dup2(errors, 2)
            os.dup2(2, 1)
            os._exit(_status())
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    entered.seek(0)
    return statuses, sorted(set(entered.read().decode().split()))


def _status() -> int:
    from fasttfm.__main__ import command

    try:
        return command()
    except SystemExit as end:
        return end.code or 0


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        errors = os.open(request["errors"], os.O_WRONLY | os.O_APPEND)
        print(json.dumps([_run(**run, errors=errors) for run in request["runs"]]), flush=True)
        os.close(errors)
