"""Waiting for what other processes and threads do: for a condition, never for a time."""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forked import TrainingPopen

PATIENCE = 800
"""Seconds after which a test gives up, on a machine that is busy with much else: fewer than pytest's own limit."""


def wait_until(condition: Callable[[], object]) -> None:
    """Return as soon as condition() is true. Raises AssertionError after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"this took more than {PATIENCE} s"
        time.sleep(0.01)


def wait_for_end(pids: Sequence[int]) -> None:
    """Return when none of the processes is alive."""
    wait_until(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    """Return whether a process runs, or sleeps; one that nobody has waited for has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def run_together(*programs: Sequence[str]) -> None:
    """Run programs of this Python that speak to each other, to their end.

    Raises AssertionError with what the first one that fails has written; the others, which would wait for it, are
    ended.
    """
    with tempfile.TemporaryFile("w+") as said:
        processes = [TrainingPopen([sys.executable, *words], stderr=said) for words in programs]
        try:
            wait_until(lambda: any(p.poll() for p in processes) or all(p.poll() == 0 for p in processes))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said.seek(0)
        assert not any(process.returncode for process in processes), said.read()


def free_port() -> int:
    """A port that nothing listens at, and that no program gets that asks for any: for servers of other processes."""
    for port in range(20_000 + (7 * os.getpid()) % 10_000, 32_000):
        with socket.socket() as listener:
            try:
                listener.bind(("localhost", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
