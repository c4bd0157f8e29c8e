"""A signal ends a rank that waits in C++ for another one."""

import os
import signal
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE, free_port

from .tiny import start

pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux")

MEETS = """
import os, torch
import torch.distributed as dist
from fasttfm.system.signals import stoppable
from fasttfm.training import workers

connect = dist.init_process_group

def connects(*given, **options):
    if os.environ["RANK"] == "1":
        os._exit(9)  # it was stopped when it had answered
    print("connects", flush=True)
    connect(*given, **options)

dist.init_process_group = connects
with stoppable(), workers.joined(torch.device("cpu"), 180):
    print("met")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_rank_that_waits_for_the_connection_of_one_that_has_ended(number):
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", MEETS]
    rank, ended = (start(command, env={**os.environ, **address, "RANK": each}) for each in "01")
    try:
        assert rank.stdout.readline() == "connects\n"
        rank.send_signal(number)
        stdout, stderr = rank.communicate(timeout=PATIENCE)
    finally:
        rank.kill()
        ended.communicate(timeout=PATIENCE)
    assert rank.returncode == -number, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
