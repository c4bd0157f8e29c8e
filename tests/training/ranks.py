"""Runs of `fasttfm train` by several ranks, forked from one process so that torch is loaded once.

    python ranks.py '[{"size": 2, "words": ["train", ...], "fault": null}, ...]'

Prints a JSON list: the exit statuses of each run's ranks. A fault is [rank, update, kind]: before its update's step
the rank raises a UserError, is killed, or gets a signal, by kind "error", "SIGKILL" or "SIGTERM"; with "nan" the loss
of its part of the update is no number; with "validation" it gets a SIGTERM in that validation (they count from 1).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

PATIENCE = 1500
"""Seconds that a list of runs may take on a machine that is busy with much else."""


def run_ranks(*runs: dict) -> tuple[list[list[int]], str]:
    """The exit statuses of each run's ranks, and all that was written to standard error."""
    command = [sys.executable, str(Path(__file__)), json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def _inject(fault: list | None, rank: int) -> None:
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
            if kind == "error":
                raise UserError("this rank has met a wall")
            os.kill(os.getpid(), signal.Signals[kind])
        return step(self, lr)

    Optimization.step = failing  # type: ignore[method-assign]


def _exchange_in(bucket: int) -> None:
    """Let gradients be exchanged in buckets of so many, at least."""
    from fasttfm.training import exchange

    exchange.GradientExchange.__init__.__defaults__ = (bucket,)  # type: ignore[attr-defined]


def _run(size: int, words: list[str], fault: list | None = None, bucket: int = 0) -> list[int]:
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
            _inject(fault, rank)
            if bucket:
                _exchange_in(bucket)
            sys.argv = ["fasttfm", *words]
            os.dup2(2, 1)
            os._exit(_status())
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _status() -> int:
    from fasttfm.__main__ import command

    try:
        return command()
    except SystemExit as end:
        return end.code or 0


if __name__ == "__main__":
    import torch
    import torch.distributed

    import fasttfm.cli.train
    import fasttfm.training.run  # noqa: F401

    torch.set_num_threads(1)
    statuses = [_run(**run) for run in json.loads(sys.argv[1])]
    print(json.dumps(statuses), flush=True)
