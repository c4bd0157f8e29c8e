"""Search in worker processes: equal results, one-line errors, no process left behind."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import Popen, forked_children
from waiting import PATIENCE, wait_for_end, wait_until

from fasttfm.errors import UserError
from fasttfm.search import DecodingConfig, search_ids
from fasttfm.search.search import search_workers
from fasttfm.system.processes import WorkerPool

from .small_models import model_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
SETTINGS = DecodingConfig(beam=3, nbest=2, max_len_a=0.0, max_len_b=6)
SOURCES = [[4 + (7 * row + position) % 60 for position in range(3 + row % 9)] + [3] for row in range(40)]


tiny_model = partial(model_of, "fp32", 64, 32, 2, std=4.0, decoder_layers=1)


@pytest.fixture(scope="module")
def workers():
    with search_workers(tiny_model(), 2) as pool:
        yield pool


@pytest.mark.parametrize(
    "settings", [SETTINGS, DecodingConfig(beam=1, max_len_b=4), DecodingConfig(sampling=True, nbest=2, max_len_b=4)]
)
def test_results_equal_those_of_one_process_bit_for_bit(workers, settings):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = search_ids(workers.model, SOURCES, settings, max_tokens=64)
    torch.set_num_threads(threads)
    assert search_ids(workers.model, SOURCES, settings, max_tokens=64, workers=workers) == expected
    assert search_ids(workers.model, SOURCES, settings, workers=workers) == expected
    assert search_ids(workers.model, SOURCES[:1], settings, workers=workers) == expected[:1]
    assert search_ids(workers.model, [], settings, workers=workers) == []
    assert torch.get_num_threads() == threads
    assert len(set(workers.pids)) == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [UserError("what the user must do"), ZeroDivisionError("a bug"), MemoryError("full")])
def test_an_error_is_raised_once_and_the_workers_restart(workers, error):
    with pytest.raises(type(error), match=str(error)) as caught:
        list(workers.each(_fail, [(error,)] * 4))
    cause = caught.value.__cause__
    assert (cause is None) == isinstance(error, UserError)
    assert cause is None or "in _fail" in str(cause)
    assert workers.pids == []
    assert len(dict(workers.each(_who, [(0.0, 1)] * 4))) == 4


def test_concurrent_threads_are_all_told_of_a_kill_and_can_go_on(workers, tmp_path):
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(workers.call, _met, tmp_path, number) for number in range(6)]
        assert [call.result()[1] for call in calls] == [*range(6)]
        assert {call.result()[0] for call in calls} == {*workers.pids}
        sleeping, killed = threads.submit(workers.call, _who, 1000.0, 0), threads.submit(workers.call, _kill)
        for call in (sleeping, killed):
            with pytest.raises(UserError, match=r"worker \d was ended by SIGKILL: run the same command again"):
                call.result(PATIENCE)
        assert threads.submit(workers.call, _who, 0.0, 7).result(PATIENCE)[1] == 7


def test_little_work_starts_no_processes():
    with search_workers(tiny_model(), 2, least_work=1e15) as workers:
        search_ids(workers.model, SOURCES, SETTINGS, max_tokens=16, workers=workers)
        assert workers.pids == []
    assert search_workers(tiny_model(), 1) is None
    with pytest.raises(ValueError, match="0 workers"):
        WorkerPool(tiny_model(), 0, remedy="")


PROGRAM = """
import sys, time
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from tests.search import test_workers as tests
with tests.search_workers(tests.tiny_model(), 2) as workers:
    list(workers.each(tests._who, [(0.0, 1)] * 4))
    print(*workers.pids, flush=True)
    list(workers.each(tests._who, [(10_000.0, 1)] * 4))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_a_killed_program(number):
    program = PROGRAM.format(root=str(Path(__file__).parents[2]))
    words = [sys.executable, "-c", program]
    process = Popen(words, env=forked_children(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    wait_for_end(pids)


def _who(model, seconds, number):
    time.sleep(seconds)
    return os.getpid(), number


def _met(model, folder, number):
    """Wait until the other worker is here too."""
    (folder / str(os.getpid())).touch()
    wait_until(lambda: len(list(folder.iterdir())) >= 2)
    return os.getpid(), number


def _fail(model, error):
    raise error


def _kill(model):
    os.kill(os.getpid(), signal.SIGKILL)
