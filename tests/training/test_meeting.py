"""A signal at any moment of the rendezvous ends all ranks, even those that wait in C++."""

import os
import signal
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE, free_port

from .tiny import start

pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux")

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MEETS = """
import datetime, os, sys, torch
import torch.distributed as dist
from fasttfm.errors import UserError
from fasttfm.system.signals import stoppable
from fasttfm.training import workers

connect = dist.init_process_group

def connects(*given, **options):
    if os.environ["RANK"] == "1":
        os._exit(9)  # it was stopped when it had answered
    print("connects", flush=True)
    connect(*given, **options)

dist.init_process_group = connects
workers._PATIENCE_TO_CONNECT = datetime.timedelta(seconds=float(sys.argv[1]))
with stoppable():
    try:
        with workers.joined(torch.device("cpu"), 180):
            print("met")
    except UserError as error:
        sys.exit(str(error))
"""


@pytest.fixture
def left():
    """Start two ranks; the second exits once both have joined; returns the first, whose timeout is in seconds."""
    ranks = []

    def begin(seconds):
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        command = [sys.executable, "-c", MEETS, str(seconds)]
        ranks.extend(start(command, env={**os.environ, **address, "RANK": str(rank)}) for rank in (0, 1))
        return ranks[0]

    yield begin
    for rank in ranks:
        rank.kill()
        rank.communicate()


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_a_rank_that_waits_for_the_connection_of_one_that_has_ended(left, number):
    rank = left(10 * PATIENCE)
    assert rank.stdout.readline() == "connects\n"
    rank.send_signal(number)
    stdout, stderr = rank.communicate(timeout=PATIENCE)
    assert rank.returncode == -number, stderr
    assert stdout == ""
    assert "Traceback" not in stderr


def test_a_connection_is_waited_for_some_seconds_only(left):
    rank = left(1)
    _, stderr = rank.communicate(timeout=PATIENCE)
    assert rank.returncode == 1
    assert "another rank has joined, but not connected for 1 s" in stderr
