"""A signal at any moment of the rendezvous ends all ranks, even those that wait in C++."""

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from waiting import PATIENCE, free_port, is_alive, wait_until

from .tiny import start, train_command

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


def living_in(folder):
    """Processes with this working directory."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if (process / "cwd").readlink() == folder and is_alive(int(process.name)):
                processes.append(int(process.name))
    return processes


LAUNCHES = """
import json, os, subprocess, sys, time
subprocess.Popen(json.loads(sys.argv[1]), env={**os.environ, "TORCHELASTIC_RUN_ID": "run"})
time.sleep(600)
"""


def test_a_rank_that_waits_for_others_ends_with_a_launcher_that_is_killed(tiny_data, tmp_path):
    port = free_port()
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "0"}
    words = [sys.executable, "-c", LAUNCHES, json.dumps(train_command(tiny_data, tmp_path / "M"))]
    launcher = start(words, env={**os.environ, **address}, cwd=tmp_path, start_new_session=True)

    def listens():
        with socket.socket() as probe:
            return probe.connect_ex(("localhost", port)) == 0

    wait_until(listens)
    launcher.kill()
    launcher.communicate(timeout=PATIENCE)  # the rank has its pipes too
    wait_until(lambda: not living_in(tmp_path))


LONG = {"max_update": 100_000, "valid_interval_updates": 0, "save_interval_updates": 0}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["--workers", "torchrun"])
def test_a_signal_at_a_random_moment_of_the_meeting_leaves_no_process(tiny_data, tmp_path, launcher):
    seed = int(os.environ.get("FASTTFM_SIGNAL_SEED") or int.from_bytes(os.urandom(3), "big"))
    draw, moments = random.Random(seed), []

    def begin(folder):
        folder.mkdir()
        command = train_command(tiny_data, folder / "M", **LONG)
        words = [*command, "--workers", "2"] if launcher == "--workers" else [*TORCHRUN, *command[1:]]
        return start(words, cwd=folder, start_new_session=True)

    began = time.monotonic()
    process = begin(tmp_path / "first")
    assert any("2 workers" in line for line in process.stderr)
    longest = time.monotonic() - began
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    for n, number in enumerate(ENDING):
        folder = tmp_path / str(n)
        process = begin(folder)
        moments.append(round(draw.uniform(0, longest), 3))
        time.sleep(moments[-1])
        process.send_signal(number)
        said = f"FASTTFM_SIGNAL_SEED={seed}: {signal.Signals(number).name} after {moments} of {longest:.3f} s"
        try:
            _, stderr = process.communicate(timeout=PATIENCE)
            wait_until(lambda folder=folder: not living_in(folder))
        finally:
            for pid in living_in(folder):
                os.kill(pid, signal.SIGKILL)
        assert process.returncode in (-number, 128 + number, 1), (said, stderr)
    print(said)
