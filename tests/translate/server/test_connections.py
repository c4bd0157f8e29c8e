"""Connections: accepted hosts and origins, and clients that are slow, silent, gone, or too many."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from model_dirs import LINES
from served import Slow, ask, connected, metrics, posted, serving, texts
from waiting import PATIENCE, wait_until

from fasttfm.translate.server.limits import Limits


def test_connections_beyond_the_limit_are_refused_and_counted(translator):
    with serving({"small": translator}, Limits(connections=2)) as url:
        with connected(url), connected(url):
            answer = requests.get(f"{url}/health", timeout=PATIENCE)
            assert (answer.status_code, "retry" in answer.json()["detail"]) == (503, True)
        # this request itself may come before the two are closed, and is then refused and counted
        wait_until(lambda: re.search(r"connections_refused_total [1-9]", metrics(url)))


HEAD = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_client_that_sends_half_a_request_or_does_not_read_is_disconnected(translator):
    """When six half requests have ended in turn, the time to read the responses is over."""
    head, body = posted(text="a dog")
    limits = Limits(seconds=1, head_seconds=0.5)
    with serving({"small": translator}, limits, send_buffer=2048) as url, connected(url) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.sendall(HEAD * 40)
        with connected(url) as waiting:
            waiting.sendall(head + body[:1])
            assert waiting.recv(1000).startswith(b"HTTP/1.1 504")
        for _ in range(6):
            with connected(url) as half:
                half.sendall(HEAD[:5])
                assert half.recv(1000) == b""
        assert "fasttfm_connections 1.0" in metrics(url)


def test_two_lengths_of_a_body_close_the_connection(url):
    head, body = posted(text="a dog")
    with connected(url) as client:
        client.sendall(head[:-2] + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
        received = b""
        while part := client.recv(1000):
            received += part
    assert received.startswith(b"HTTP/1.1 400")


def test_a_client_that_hangs_up_is_dropped(translator):
    slow = Slow(translator)
    with serving({"small": slow}) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, url, text=LINES[0])
        assert slow.begun.wait(PATIENCE)
        head, body = posted(text=LINES[1])
        with connected(url) as client:
            client.sendall(head + body)
            wait_until(lambda: "fasttfm_queue_sentences 1.0" in metrics(url))
        wait_until(lambda: 'status="499"' in metrics(url))
        with connected(url) as half:
            half.sendall(head + body[:1])
        slow.may.set()
        assert texts(first.result(PATIENCE)) == translator.translate(LINES[:1])
        assert texts(ask(url, text=LINES[2])) == translator.translate(LINES[2:3])
    assert [LINES[1]] not in slow.batches


def test_a_listed_origin_gets_cors_headers(translator):
    origin = "https://page.example"
    with serving({"small": translator}, origins=[f"{origin}/"]) as url:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization,content-type"
        asked = requests.options(f"{url}/translate", headers=headers, timeout=PATIENCE)
        assert asked.status_code == 200
        assert "Content-Type" in asked.headers["Access-Control-Allow-Headers"]
        answer = requests.post(f"{url}/translate", json={"text": "a"}, headers={"Origin": origin}, timeout=PATIENCE)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == asked.headers["Access-Control-Allow-Origin"] == origin
        other = requests.options(f"{url}/translate", headers={"Origin": "https://other.example"}, timeout=PATIENCE)
        assert other.status_code == 403
        assert "Access-Control-Allow-Origin" not in other.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "127.0.0.1", "Origin": "http://127.0.0.1"}, 200),
        ({"Host": "127.0.0.1:1", "Origin": "http://127.0.0.1:2"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/translate", "/health"])
def test_other_host_names_and_origins_are_refused(url, path, headers, status):
    method = "POST" if path == "/translate" else "GET"
    answer = requests.request(method, f"{url}{path}", json={"text": "a dog"}, headers=headers, timeout=PATIENCE)
    assert answer.status_code == status, answer.text
    if status == 403:
        assert re.search("--allow-(host|origin)", answer.json()["detail"])
