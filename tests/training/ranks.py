"""Runs of `fasttfm train` by several ranks, forked from one process so that torch is loaded once.

    python ranks.py '[{"size": 2, "words": ["train", ...], "fault": null}, ...]'

Prints a JSON list: of each run the exit statuses of its ranks, and the passes compiled by numba that they have entered;
with "numba": false it is as if numba were not installed. Passes are entered however small a batch is.

A fault is [rank, update, kind]: before its update's step the rank raises a UserError, hangs until rank 0 ends, is
killed, or gets a signal, by kind "error", "hang", "SIGKILL" or "SIGTERM"; with "nan" the loss of its part of the
update is no number; with "validation" it gets a SIGTERM in that validation (they count from 1).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from fasttfm.cpu import thresholds, training_passes
from fasttfm.cpu.step_passes import usable

sys.path.insert(0, str(Path(__file__).parents[1]))
from subprocess import run

from numba_passes import passes_entered

PATIENCE = 1500
"""Seconds that a list of runs may take on a machine that is busy with much else."""


PASSES = {"softmax", "softmax_gradient", "residual_layer_norm", "residual_layer_norm_gradient"}
"""What training a Transformer enters with numba, from some size on; dropout beside it draws its masks there."""


def run_ranks(*runs: dict, numba: bool = True) -> tuple[list[list[int]], str]:
    """The exit statuses of each run's ranks, and all that was written to standard error.

    Every run that succeeds must have entered the passes compiled by numba, and without numba must not have entered
    any.
    """
    command = [sys.executable, str(Path(__file__)), json.dumps([{"numba": numba, **run} for run in runs])]
    done = run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for statuses, entered in results:
        if not any(statuses):
            assert (set(entered) >= PASSES) if numba and usable() else not entered, entered
    return [statuses for statuses, _ in results], done.stderr


def _inject(fault: list | None, rank: int, first: int) -> None:
    """first: the process of rank 0."""
    from fasttfm.errors import UserError
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
        return
    if kind == "validation":
        part, validations = Validator.part, iter(range(1, 100))

        def stopped(self, *given):
            if next(validations) == update:
                os.kill(os.getpid(), signal.SIGTERM)
            return part(self, *given)

        Validator.part = stopped  # type: ignore[method-assign]
        return
    step, count = Optimization.step, 0

    def failing(self, lr):
        nonlocal count
        count += 1
        if count == update:
            if kind == "hang":
                _wait_for_the_end_of(first)
                os._exit(0)
            if kind == "error":
                raise UserError("this rank has met a wall")
            os.kill(os.getpid(), signal.Signals[kind])
        return step(self, lr)

    Optimization.step = failing  # type: ignore[method-assign]


def _wait_for_the_end_of(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(0.1)


def _exchange_in(bucket: int) -> None:
    """Let gradients be exchanged in buckets of so many, at least."""
    from fasttfm.training import exchange

    exchange.GradientExchange.__init__.__defaults__ = (bucket,)  # type: ignore[attr-defined]


def _run(
    size: int,
    words: list[str],
    fault: list | None = None,
    bucket: int = 0,
    *,
    numba: bool = True,
) -> tuple[list[int], list[str]]:
    entered = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (the ranks write to it)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ.update({name: str(number) for name, number in ranks.items()})
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
            if size == 1:
                del os.environ["WORLD_SIZE"]
            passes_entered(numba, lambda name: os.write(entered.fileno(), f"{name}\n".encode()))
            thresholds._forced.update(dict.fromkeys(thresholds.LEAST, 1))
            _inject(fault, rank, children[0] if rank else os.getpid())
            if bucket:
                _exchange_in(bucket)
            sys.argv = ["fasttfm", *words]
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
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import fasttfm.cli.train
    import fasttfm.training.run  # noqa: F401

    torch.set_num_threads(1)
    if usable():  # loads numba once for all
        training_passes.loops()
    statuses = [_run(**run) for run in json.loads(sys.argv[1])]
    print(json.dumps(statuses), flush=True)
