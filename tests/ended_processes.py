"""Whether processes have ended."""

import time
from pathlib import Path

PATIENCE = 300
"""Seconds until a process must have ended."""


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
