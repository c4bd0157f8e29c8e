"""Connections: accepted hosts and origins, and clients that are slow, silent, gone, or too many."""

import asyncio
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import requests
from model_dirs import LINES
from served import Slow, ask, connected, metrics, posted, serving, texts
from waiting import PATIENCE, wait_until

from fasttfm.translate.server.app import App
from fasttfm.translate.server.connections import Listener, server
from fasttfm.translate.server.limits import Limits
from fasttfm.translate.server.metrics import Metrics
from fasttfm.translate.server.requests import read_request


def test_connections_beyond_the_limit_are_refused_and_counted(translator):
    with serving({"small": translator}, Limits(connections=2)) as url:
        with connected(url), connected(url):
            answer = requests.get(f"{url}/health", timeout=PATIENCE)
            assert (answer.status_code, "retry" in answer.json()["detail"]) == (503, True)
        # this request itself may come before the two are closed, and is then refused and counted
        wait_until(lambda: re.search(r"connections_refused_total [1-9]", metrics(url)))


class Clock:
    """An event loop whose time the test advances."""

    def __init__(self):
        self.now, self.timers = 100.0, []
        self.create_task = asyncio.get_running_loop().create_task

    def time(self):
        return self.now

    def call_at(self, when, act):
        timer = SimpleNamespace(when=when, act=act, cancel=lambda: self.timers.remove(timer))
        self.timers.append(timer)
        return timer

    def call_later(self, seconds, act):
        return self.call_at(self.now + seconds, act)

    async def go_on(self, seconds):
        self.now += seconds
        for timer in [each for each in self.timers if each.when <= self.now]:
            self.timers.remove(timer)
            timer.act()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


class Client(asyncio.Transport):
    """The transport of a connection, which records what is done to it."""

    def __init__(self):
        super().__init__()
        self.written, self.ended = b"", None

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.ended is not None

    def close(self):
        self.ended = self.ended or "closed"

    def abort(self):
        self.ended = "aborted"

    def pause_reading(self):
        pass

    resume_reading = pause_reading

    def set_write_buffer_limits(self, high):
        assert high == 0, "what is unsent would not be noticed"


def connection(clock, act):
    """An accepted connection and its transport. act(scope, send): the application."""

    async def app(scope, receive, send):
        await act(scope, send)

    listener, limits, client = Listener(), Limits(seconds=60, head_seconds=10), Client()
    running = server(SimpleNamespace(starlette=app, metrics=Metrics()), listener, limits)
    running.config.load()
    ours = running.config.http_protocol_class(running.config, running.server_state, {}, clock)
    ours.connection_made(client)
    listener.close()
    return ours, client


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer(scope, send):
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


def test_the_time_of_a_request_counts_from_its_first_byte():
    """For a pipelined request, from the previous response."""
    begun = []

    async def note(scope, send):
        begun.append(scope["state"]["begun"])
        await answer(scope, send)

    async def talk():
        clock = Clock()
        ours, client = connection(clock, note)
        for sent in (HEAD[:5], HEAD[5:], HEAD, HEAD + HEAD):
            await clock.go_on(3)
            ours.data_received(sent)
        await clock.go_on(1)
        assert client.ended is None
        await clock.go_on(10)
        assert client.ended == "closed"

    asyncio.run(talk())
    assert begun == [103, 109, 112, 113]


def test_a_client_that_does_not_read_is_disconnected():
    async def talk(read_after, seconds):
        clock = Clock()
        ours, client = connection(clock, answer)
        ours.data_received(HEAD)
        ours.pause_writing()  # as the transport does while data is unsent
        await clock.go_on(0)
        ours.resume_writing()  # the head has been sent
        await clock.go_on(0)
        assert client.written.endswith(b"{}")
        ours.pause_writing()
        ours._watch()
        await clock.go_on(read_after)
        if read_after < 60:
            assert client.ended in (None, "closed"), "uvicorn closes it after sending the rest"
            ours.resume_writing()
        await clock.go_on(seconds)
        return client.ended

    assert asyncio.run(talk(69, 1)) == "aborted"
    assert asyncio.run(talk(20, 10)) == "closed"


def test_a_body_that_does_not_arrive_times_out(translator):
    """The time counts from the first byte of the request."""
    app = App({"small": translator}, Limits(seconds=60))
    sent = []

    async def ask(begun_before, body):
        now = asyncio.get_running_loop().time()
        headers = [(b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/translate", "headers": headers, "query_string": b""}

        async def receive():
            return next(messages, None) or await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        messages = iter([{"type": "http.request", "body": body, "more_body": not body}])
        await app.starlette({**scope, "state": {"begun": now - begun_before}}, receive, send)
        return [message["status"] for message in sent if "status" in message][-1]

    assert asyncio.run(ask(0, b'{"text": "a dog"}')) == 200
    assert asyncio.run(ask(59.8, b"")) == 504
    app.engine.stop()


def test_large_bodies_do_not_delay_small_ones_and_are_dropped_with_their_clients(translator, monkeypatch):
    may, begun, bodies = threading.Event(), threading.Event(), []

    def read(body, *others):
        bodies.append(len(body))
        if len(body) > 100_000:
            begun.set()
            assert may.wait(PATIENCE)
        return read_request(body, *others)

    monkeypatch.setattr("fasttfm.translate.server.app.read_request", read)
    with serving({"small": translator}) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, url, text=["<" * 200_000])
        assert begun.wait(PATIENCE)
        with connected(url) as client:
            client.sendall(b"".join(posted(text="<" * 300_000)))
            client.shutdown(socket.SHUT_WR)
            assert texts(ask(url, text=LINES)) == translator.translate(LINES)
        wait_until(lambda: 'status="499"' in metrics(url))
        last = pool.submit(ask, url, text=["<" * 400_000])
        may.set()
        assert [each.result(PATIENCE).status_code for each in (first, last)] == [422, 422]
    assert [size // 100_000 for size in bodies if size > 100_000] == [2, 4]


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
