"""The HTTP server: batches, limits, the token, and the command that starts it."""

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import requests
from forked import Popen
from model_dirs import LINES, PAIRS
from served import Slow, ask, metrics, serving, texts
from waiting import PATIENCE, wait_until

from fasttfm.cli.main import main
from fasttfm.translate.server.limits import Limits


def test_waiting_sentences_are_translated_together(translator):
    slow = Slow(translator)
    with serving({"small": slow}) as url, ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, url, text=LINES[0])
        assert slow.begun.wait(PATIENCE)
        others = [pool.submit(ask, url, text=line) for line in LINES[1:5]]
        wait_until(lambda: "fasttfm_queue_sentences 4.0" in metrics(url))
        slow.may.set()
        assert [texts(each.result(PATIENCE))[0] for each in (first, *others)] == translator.translate(LINES[:5])
    assert [len(batch) for batch in slow.batches] == [1, 4]


def test_a_huge_body_is_refused_with_and_without_content_length(url):
    def parts():
        for _ in range(40):
            yield b" " * 100_000

    assert requests.post(f"{url}/translate", data=b" " * 2_000_000, timeout=PATIENCE).status_code == 413
    with suppress(requests.ConnectionError):  # the server may close while it is still sending
        assert requests.post(f"{url}/translate", data=parts(), timeout=PATIENCE).status_code == 413
    assert ask(url, text="a dog").status_code == 200


def test_a_full_queue_gives_429_and_a_timeout_504(translator):
    slow = Slow(translator)
    with serving({"small": slow}, Limits(queue=2, seconds=1.0)) as url:
        assert ask(url, text=LINES[:3]).status_code == 429
        assert ask(url, text=LINES[:1]).status_code == 504
        assert slow.begun.wait(PATIENCE)
        slow.may.set()
        stream = requests.post(f"{url}/translate", json={"text": "a dog", "stream": True}, timeout=PATIENCE)
        assert "done" in stream.text or "504" in stream.text


def test_the_bearer_token_is_required(translator):
    with serving({"small": translator}, token="s3cret") as url:
        for given, status in ((None, 401), ("Bearer wrong", 401), ("Basic s3cret", 401), ("Bearer s3cret", 200)):
            headers = {"Authorization": given} if given else {}
            answer = requests.post(f"{url}/translate", json={"text": "a dog"}, headers=headers, timeout=PATIENCE)
            assert answer.status_code == status, given
        assert requests.get(f"{url}/health", timeout=PATIENCE).json()["status"] == "ok"
        assert "security" in requests.get(f"{url}/openapi.json", timeout=PATIENCE).json()["paths"]["/translate"]["post"]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_the_command_answers_open_requests_before_it_stops(model_dir, translator):
    """With few descriptors it takes as many connections as it may, and says so."""
    program = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1024)); "
    program += "from fasttfm.cli.main import main; raise SystemExit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "serve", str(model_dir), "--port", "0"]

    def steps() -> str:
        return re.search(r"fasttfm_batch_sentences_count (\S+)", metrics(url))[1]

    lines = list(PAIRS) * 16
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split(" at ")[1].strip()
            before = steps()
            with ThreadPoolExecutor(1) as client:
                asked = client.submit(ask, url, text=lines)
                while steps() == before:
                    pass
                server.send_signal(signal.SIGTERM)
                assert texts(asked.result(PATIENCE)) == translator.translate(lines)
            out, errors = server.communicate(timeout=PATIENCE)
        finally:
            server.kill()
    assert (server.returncode, out) == (0, "stopped\n")
    assert re.fullmatch(r"fasttfm serve: warning: it takes 9\d\d connections, .*, not 1,000\n", errors)


@pytest.mark.parametrize("token", ["", " ", "two words", "\udcff", "é"])
def test_an_invalid_token_is_refused(token, model_dir, monkeypatch, capsys):
    monkeypatch.setenv("FASTTFM_SERVE_TOKEN", token)
    assert main(["serve", str(model_dir)]) == 2
    assert capsys.readouterr().err.startswith("fasttfm serve: FASTTFM_SERVE_TOKEN: must hold one token")


def test_invalid_arguments_are_refused_in_one_line(tmp_path, model_dir, refusal_of):
    (tmp_path / "token").write_text("two words")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for arguments in (
            [tmp_path / "none", "--port", "0"],
            [model_dir, "--port", taken.getsockname()[1]],
            [model_dir, "--host", "no.such.host.invalid"],
            [model_dir, model_dir, "--port", "0"],
            [model_dir, "--token-file", tmp_path / "token"],
            [model_dir, "--max-queue", "0"],
        ):
            assert refusal_of(["serve", *arguments]).startswith("fasttfm serve: ")
