"""`fasttfm train --workers N`: starts torchrun's launcher on this machine.

    fasttfm train --workers 2 …      is      torchrun --standalone --nproc-per-node 2 --no-python fasttfm train …

with each process's own messages instead of torchrun's report. The default on a CPU is one process per core: threads
synchronize at each of an update's thousands of operators, processes once per update.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fasttfm.errors import LOST_PEER, UserError, interrupted
from fasttfm.system.children import PARENT, child_environment, command_line, signal_name
from fasttfm.system.machine import allowed_cores

_GRACE = 600
"""Seconds that stopped ranks have to finish the update and save."""
_INTERVAL = 3
"""Seconds between two checks of the ranks."""


def number_of_workers(workers: int | None, threads: int, device: str | None) -> int:
    """Return the number of processes to start; 1 to train in this process, as under torchrun.

    workers: --workers, None for auto. threads: --threads, 0 if not set. device: --device.
    """
    size = os.environ.get("WORLD_SIZE")
    if size is not None:
        if workers not in (None, int(size)):
            raise UserError(f"--workers {workers}: torchrun has started {size} processes: leave --workers out")
        return 1
    if workers is not None:
        return workers
    if threads:
        return 1
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return usable_cores() if device == "cpu" else 1


def launch(workers: int, arguments: Sequence[str], started: float) -> int:
    """Run `fasttfm ARGUMENTS` in this many processes and return the exit status.

    started: start time of the command by time.monotonic(), a clock that all processes of the machine share.
    The first process that fails reports its error and ends the others. A stop signal exits after rank 0 has saved and
    printed a message. Raises UserError for a process killed by a signal and if processes cannot connect to each other.
    Warns of a paused rank (SIGSTOP).
    """
    _refuse_without_loopback()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_GRACE))
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may resolve to another interface
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the launcher's own reports of signals and failures
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
            # All others go to this program's handler, and ranks get SIGTERM. It also ends a rank whose interpreter is
            # starting, where Python may drop Ctrl-C, and a second one does not interrupt the launcher's shutdown
            signals_to_handle="SIGQUIT",
        )
        os.environ.update(child_environment({}))
        over = threading.Event()
        threading.Thread(target=_watch, args=(over,), daemon=True).start()
        try:
            program, *words = command_line(*arguments, started=started)
            elastic_launch(config, program)(*words)
        except SignalException as stopped:
            sys.exit(128 + stopped.sigval)  # rank 0 has printed the message
        except KeyboardInterrupt as stopped:
            sys.exit(interrupted(stopped))
        except ChildFailedError as failed:
            return _status({rank: failure.exitcode for rank, failure in failed.failures.items()})
        finally:
            over.set()
            del os.environ[PARENT]
    return 0


def _refuse_without_loopback() -> None:
    """Raise UserError if loopback connections fail; torchrun would retry for minutes."""
    try:
        with socket.create_server(("localhost", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"--workers: this machine cannot connect to itself ({error.strerror or error}): bring its loopback up (ip "
            "link set lo up), or give --workers 1"
        ) from error


def _watch(over: threading.Event) -> None:
    """Warn of each rank that is paused in two successive checks: all others wait for it."""
    paused = None
    while hasattr(os, "waitid") and not over.wait(_INTERVAL):
        with suppress(ChildProcessError):
            child = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            if child is not None and child.si_pid == paused:
                os.waitid(os.P_PID, paused, os.WSTOPPED | os.WNOHANG)  # do not report it again
                print(
                    f"fasttfm train: warning: process {paused} is paused ({signal_name(child.si_status)}), and the "
                    f"others wait for it: kill -CONT {paused} resumes it",
                    file=sys.stderr,
                )
            paused = child and child.si_pid


def _status(statuses: dict[int, int]) -> int:
    """Return the exit status of the rank that failed first; UserError if a signal killed it."""
    # ranks that end after losing a peer or by the launcher's SIGTERM are not the cause
    secondary = (LOST_PEER, -signal.SIGTERM, 128 + signal.SIGTERM)
    rank, status = min(statuses.items(), key=lambda item: (item[1] in secondary, item[0]))
    if status < 0:
        name = signal_name(-status)
        cause = " (perhaps out of memory)" if name == "SIGKILL" else ""
        raise UserError(
            f"worker {rank} was ended by {name}{cause}: run the same command again to resume from the last checkpoint "
            "if there is one"
        )
    return status


def usable_cores() -> int:
    """Return the number of cores this process may use, limited by OMP_NUM_THREADS."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(allowed_cores(), int(limit)) if limit.isdecimal() and int(limit) else allowed_cores()
