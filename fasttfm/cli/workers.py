"""`fasttfm train --workers N`: torchrun's own launcher, started for the user on this machine.

    fasttfm train --workers 2 …      is      torchrun --standalone --nproc-per-node 2 --no-python fasttfm train …

with each process's own message in place of torchrun's report. On a CPU it is one process a core: threads wait for one
another at every one of some thousand operators of an update, processes once.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from fasttfm.errors import LOST_PEER, UserError, interrupted
from fasttfm.system.children import PARENT, child_environment, command_line, signal_name
from fasttfm.system.machine import allowed_cores

_GRACE = 600
"""Seconds that ranks have to finish an update and save when they are stopped."""


def number_of_workers(wanted: int | None, threads: int, device: str | None) -> int:
    """Return how many processes to start; 1 for training in this one, also where it is one of torchrun's already.

    wanted: by --workers, None for auto. threads: of each process, 0 if that was left open. device: by --device.
    """
    size = os.environ.get("WORLD_SIZE")
    if size is not None:
        if wanted not in (None, int(size)):
            raise UserError(f"--workers {wanted}: torchrun has started {size} processes: leave --workers out")
        return 1
    if wanted is not None:
        return wanted
    if threads:
        return 1
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return usable_cores() if device == "cpu" else 1


def launch(workers: int, arguments: Sequence[str], started: float) -> int:
    """Run `fasttfm` with these arguments in so many processes, and return its exit status.

    started: when this command began, by time.monotonic(), which all processes of a machine share.
    The first process that fails ends all; it has told why. Raises Stopped when this process was asked to stop, after
    rank 0 has saved and said so, and UserError for a process that was killed, which could say nothing.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_GRACE))
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the machine's name resolves to
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # of the launcher, which reports signals and failures in its own way
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            # SIGTERM and SIGHUP are left to this program's handler: a second one would strike the launcher's shutdown,
            # which would send it on to ranks that are ending
            signals_to_handle="SIGINT,SIGQUIT",
        )
        os.environ.update(child_environment({}))
        try:
            program, *words = command_line(*arguments, started=started)
            elastic_launch(config, program)(*words)
        except SignalException as stopped:
            sys.exit(128 + stopped.sigval)  # rank 0 has said so
        except KeyboardInterrupt as stopped:
            sys.exit(interrupted(stopped))
        except ChildFailedError as failed:
            return _status({rank: failure.exitcode for rank, failure in failed.failures.items()})
        finally:
            del os.environ[PARENT]
    return 0


def _status(statuses: dict[int, int]) -> int:
    """The exit status of a run whose ranks ended with these; UserError for a rank that a signal has killed."""
    # a rank that ends with another, on its own or by the launcher, is not the one that failed
    led = (LOST_PEER, -signal.SIGTERM, 128 + signal.SIGTERM)
    rank, status = min(statuses.items(), key=lambda item: (item[1] in led, item[0]))
    if status < 0:
        name = signal_name(-status)
        cause = " (memory may not have sufficed)" if name == "SIGKILL" else ""
        raise UserError(
            f"worker {rank} was ended by {name}{cause}: run the same command again, which goes on from the last "
            "checkpoint if there is one"
        )
    return status


def usable_cores() -> int:
    """Return the cores that OMP_NUM_THREADS leaves to this program."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return min(allowed_cores(), int(told)) if told.isdecimal() and int(told) else allowed_cores()
