"""The HTTP server: translations, refusals, and the command that starts it."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import requests
from forked import Popen
from model_dirs import LINES, PAIRS
from served import Slow, ask, connected, metrics, serving, texts
from waiting import PATIENCE, wait_until

from fasttfm.cli.main import main
from fasttfm.translate import Translator
from fasttfm.translate.server.limits import Limits


def test_texts_are_translated_like_by_the_translator(url, translator):
    assert texts(ask(url, text=LINES)) == translator.translate(LINES)
    assert texts(ask(url, text=LINES[0])) == translator.translate(LINES[:1])
    assert texts(ask(url, text=[])) == []
    assert texts(ask(url, text=["", " "])) == ["", ""]


def test_lines_of_a_text_stay_lines(url, translator):
    text = f"{LINES[0]}\n\n{LINES[1]}"
    answer = ask(url, text=[text, LINES[2]], nbest=2)
    best = [each[:1] if not line else each for line, each in zip(LINES, translator.translate_nbest(LINES), strict=True)]
    assert texts(answer) == ["\n".join([best[0][0].text, "", best[1][0].text]), best[2][0].text]
    assert [len(each) for each in answer.json()["translations"]] == [2, 2]
    assert ask(url, text="\n" * 256).status_code == 422


def test_prefixes_and_samples_equal_those_of_the_translator(url, model_dir):
    drawn = Translator.from_directory(model_dir, workers=1, sampling=True, sampling_seed=7, nbest=2)
    expected = drawn.translate_nbest(LINES[:3])
    for _ in range(2):
        answer = ask(url, text=LINES[:3], sampling=True, sampling_seed=7, nbest=2)
        assert [[each["text"] for each in best] for best in answer.json()["translations"]] == [
            [each.text for each in best] for best in expected
        ]
    plain = Translator.from_directory(model_dir, workers=1)
    prefixes = ["eine", "", "der Hund"]
    answer = ask(url, text=LINES[:3], prefix=prefixes)
    assert texts(answer) == plain.translate(LINES[:3], prefixes)
    for given in (["eine"], "eine", [1, 2, 3]):
        assert ask(url, text=LINES[:3], prefix=given).status_code == 422
    assert ask(url, text="a\nb", prefix="der").status_code == 422


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


def test_a_stream_has_one_event_per_text_and_a_final_one(url, translator):
    answer = requests.post(f"{url}/translate", json={"text": LINES, "stream": True}, stream=True, timeout=PATIENCE)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.content.decode().strip().split("\n\n")
    actual = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [each["index"] for each in actual] == list(range(len(LINES)))
    assert [each["translations"][0]["text"] for each in actual] == translator.translate(LINES)
    assert events[-1].startswith("event: done")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "is truncated"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"[]", "must be an object"),
        (b"{}", "text must be"),
        (b'{"text": "a", "beem": 1}', "beem"),
        (b'{"text": "a", "beam": 1000}', "beam"),
        (b'{"text": "a", "max_len_b": 100000}', "max_len_b"),
        (b'{"text": "a", "max_len_a": 1e9}', "max_len_a"),
        (b'{"text": "\\ud800"}', "a lone surrogate"),
        (json.dumps({"text": ["a"] * 257}).encode(), "257 texts"),
        (json.dumps({"text": "a dog " * 300}).encode(), "tokens"),
    ],
)
def test_an_invalid_body_is_refused_in_one_line(url, body, words):
    answer = requests.post(f"{url}/translate", data=body, timeout=PATIENCE)
    assert answer.status_code == 422
    assert words in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]


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
    limits = Limits(queue=2, seconds=1.0)
    with serving({"small": slow}, limits) as url:
        assert ask(url, text=LINES[:3]).status_code == 429
        assert ask(url, text=LINES[:1]).status_code == 504
        assert slow.begun.wait(PATIENCE)
        slow.may.set()
        stream = requests.post(f"{url}/translate", json={"text": "a dog", "stream": True}, timeout=PATIENCE)
        assert "done" in stream.text or "504" in stream.text


@pytest.fixture(scope="module")
def launched(model_dir):
    """The address and process of a server started by the command with few descriptors."""
    program = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1024)); "
    program += "from fasttfm.cli.main import main; raise SystemExit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "serve", str(model_dir), "--port", "0"]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().split(" at ")[1].strip(), server
        finally:
            server.kill()


def test_the_bearer_token_is_required(translator):
    with serving({"small": translator}, token="s3cret") as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            answer = requests.post(f"{url}/translate", json={"text": "a"}, headers=headers, timeout=PATIENCE)
            assert answer.status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        answer = requests.post(f"{url}/translate", json={"text": "a dog"}, headers=headers, timeout=PATIENCE)
        assert answer.status_code == 200
        assert requests.get(f"{url}/health", timeout=PATIENCE).json()["status"] == "ok"
        assert "security" in requests.get(f"{url}/openapi.json", timeout=PATIENCE).json()["paths"]["/translate"]["post"]


def test_health_and_metrics(url):
    ask(url, text=LINES)
    health = requests.get(f"{url}/health", timeout=PATIENCE).json()
    assert health["models"] == ["small"]
    told = metrics(url)
    assert 'fasttfm_requests_total{path="/translate",status="200"}' in told
    assert "fasttfm_batch_sentences_bucket" in told


@pytest.fixture
def many_descriptors():
    """Raise the descriptor limit as far as the system allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_answers_despite_more_idle_connections_than_descriptors(launched, many_descriptors):
    """Its limit of descriptors was raised; otherwise fewer than 800 would fit."""
    url, server = launched
    with ExitStack() as idle:
        for _ in range(1100):
            idle.enter_context(connected(url))
        with connected(url) as another:
            assert another.recv(12) == b"HTTP/1.1 503"
    wait_until(lambda: "connections 1.0" in metrics(url))
    assert 100 < int(re.search(r"connections_refused_total (\d+)", metrics(url))[1]) < 300
    assert texts(ask(url, text=["a dog"]))
    assert server.poll() is None


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_the_command_answers_open_requests_before_it_stops(launched, translator):
    """Must be the last test of this server: it checks that nothing else was written to standard error."""
    url, server = launched
    lines = list(PAIRS) * 16

    def steps() -> str:
        return re.search(r"fasttfm_batch_sentences_count (\S+)", metrics(url))[1]

    before = steps()
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(ask, url, text=lines)
        while steps() == before:
            pass
        server.send_signal(signal.SIGTERM)
        assert texts(asked.result(PATIENCE)) == translator.translate(lines)
    out, errors = server.communicate(timeout=PATIENCE)
    assert (server.returncode, out) == (0, "stopped\n")
    assert re.fullmatch(r"fasttfm serve: warning: it takes 9\d\d connections, .*, not 1,000\n", errors)


def test_invalid_arguments_are_refused_in_one_line(tmp_path, model_dir, capsys, monkeypatch):
    (tmp_path / "token").write_text("two words")
    for given in ("", " ", "two words", "\udcff", "é"):
        monkeypatch.setenv("FASTTFM_SERVE_TOKEN", given)
        assert main(["serve", str(model_dir)]) == 2
        assert capsys.readouterr().err.startswith("fasttfm serve: FASTTFM_SERVE_TOKEN: must hold one token")
    monkeypatch.delenv("FASTTFM_SERVE_TOKEN")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments in (
            [str(tmp_path / "none"), "--port", "0"],
            [str(model_dir), "--port", port],
            [str(model_dir), "--port", "99999"],
            [str(model_dir), "--host", "no.such.host.invalid"],
            [str(model_dir), "--host", "an..empty.label"],
            [str(model_dir), str(model_dir), "--port", "0"],
            [str(model_dir), "--token-file", str(tmp_path / "token")],
            [str(model_dir), "--max-queue", "0"],
            [str(model_dir), "--workers", "0"],
        ):
            assert main(["serve", *arguments]) == 2
            assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setattr(sys, "__stdout__", None)  # as of `>&-`
    assert main(["serve", str(model_dir)]) == 1
    assert "standard output is closed" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(model_dir)]) == 2
    assert "./fasttfm[serve]" in capsys.readouterr().err
