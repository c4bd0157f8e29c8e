"""Worker processes of a server: killed ones are replaced, and every request gets its own answer."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import pytest
import requests
from forked import Popen, forked_children
from model_dirs import LINES
from waiting import PATIENCE, wait_until

from fasttfm.errors import UserError
from fasttfm.system.processes import Worker
from fasttfm.translate.server.engine import Stopping
from fasttfm.translate.server.metrics import Metrics
from fasttfm.translate.server.pool import Pool
from fasttfm.translate.server.queue import Answer, QueueFull, Sentence, sentences_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
MANY = [f"{a} {b}" for a in LINES for b in LINES]


@pytest.fixture(scope="module")
def pool(translator):
    pool = Pool({"small": translator}, Metrics(), queue=10_000, workers=2)
    yield pool
    answers = submit(pool, translator, LINES)
    pool.stop()
    assert [answer.result(0) for answer in answers] == translator.translate_nbest(LINES), "waiting ones are answered"
    with pytest.raises(Stopping):
        submit(pool, translator, LINES[:1])


def submit(pool, translator, texts):
    return pool.submit(sentences_of("small", translator.config, texts, [20] * len(texts)))


def value(pool, name: str) -> float:
    return pool.metrics.registry.get_sample_value(f"fasttfm_{name}") or 0.0


def test_an_error_of_a_worker_reaches_its_client_and_its_steps_are_counted(pool, translator):
    before = value(pool, "sentences_total")
    config = dataclasses.replace(translator.config, alignment_layer=99, coverage_penalty=0.5)
    (answer,) = pool.submit(sentences_of("small", config, ["a dog"], [20]))
    with pytest.raises(UserError, match="layer 99"):
        answer.result(PATIENCE)
    for _ in range(2):  # steps are reported before the next answer
        assert submit(pool, translator, ["a dog"])[0].result(PATIENCE)
    assert value(pool, "sentences_total") > before
    assert (len(set(pool.pids)), value(pool, "workers"), value(pool, "queue_sentences")) == (2, 2, 0)


def test_the_sentences_of_a_killed_worker_are_reassigned(pool, translator, capfd):
    ended, killed = value(pool, "workers_ended_total"), pool.pids[0]
    answers = submit(pool, translator, MANY)
    os.kill(killed, signal.SIGKILL)
    assert [answer.result(PATIENCE) for answer in answers] == translator.translate_nbest(MANY)
    wait_until(lambda: len(pool.pids) == 2 and killed not in pool.pids)
    assert value(pool, "workers_ended_total") == ended + 1
    assert submit(pool, translator, ["a dog"])[0].result(PATIENCE) == translator.translate_nbest(["a dog"])[0]
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "worker" in line]
    assert "was ended by SIGKILL: another takes its place" in told


def test_a_sentence_that_kills_worker_after_worker_fails(pool):
    ours, theirs = socket.socketpair()
    sentence = Sentence("small", None, "a dog", 2, Answer(), tries=2)  # type: ignore[arg-type]
    worker = Worker(-1, 0, Connection(ours.detach()))
    worker.asked[0] = sentence
    pool.lost(worker, "ended")
    theirs.close()
    with pytest.raises(UserError, match="workers that translated it ended"):
        sentence.answer.result(PATIENCE)


def test_the_pool_fails_if_its_parent_process_is_killed(translator):
    pool = Pool({"small": translator}, Metrics(), queue=2, workers=1)
    with pytest.raises(QueueFull):
        submit(pool, translator, LINES[:3])
    failed = threading.Event()
    pool.call_on_failure(failed.set)
    os.kill(os.getsid(pool.pids[0]), signal.SIGKILL)
    assert failed.wait(PATIENCE)
    assert "the fork server of the workers was killed" in str(pool.failure)
    with pytest.raises(Stopping):
        submit(pool, translator, LINES[:1])
    pool.stop()


def test_the_command_serves_with_workers_and_stops_on_sigterm(model_dir, translator):
    command = [sys.executable, "-m", "fasttfm", "serve", str(model_dir), "--port", "0", "--workers", "2"]
    with Popen(command, env=forked_children(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().split(" at ")[1].strip()
            answer = requests.post(f"{address}/translate", json={"text": LINES}, timeout=PATIENCE)
            assert [best[0]["text"] for best in answer.json()["translations"]] == translator.translate(LINES)
            assert "fasttfm_workers 2.0" in requests.get(f"{address}/metrics", timeout=PATIENCE).text
            server.send_signal(signal.SIGTERM)
            out, errors = server.communicate(timeout=PATIENCE)
        finally:
            server.kill()
    assert (server.returncode, out, errors) == (0, "stopped\n", "")
