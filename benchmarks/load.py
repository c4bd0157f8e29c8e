"""Load on a fasttfm server: requests at random times (open loop), or from clients in a closed loop.

Every answer is compared with the expected one; a wrong or missing answer ends the program.
"""

import http.client
import json
import random
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from fasttfm.system.parsing import parse_json

STEADY = {"short": 4, "long": 1}
"""Kind of request -> weight: one short sentence, or eight long ones."""
MIXED = {"short": 12, "text": 2, "list": 2, "slow": 1, "heavy": 1, "hang up": 2}
"""A short sentence, a text of long lines, a list, a streamed list read a few bytes at a time, a body of the largest
accepted size, or a request abandoned by the client."""
MOST_GROWTH = 1.05
"""Bound on memory in the last quarter of the run over the second quarter."""
MOST_SPREAD = 3.0
"""Bound on the 99th percentile of the latency of short requests over the median."""
PATIENCE = 120.0
_MOST_AT_ONCE = 256
_SENTENCES = {"short": 1, "heavy": 64}
"""Kind of request -> number of sentences, eight by default."""
_LARGEST = 1 << 20
_REFUSED = ({"text": "<" * (_LARGEST - 100)}, {"text": [""] * (_LARGEST // 5)}, {"text": "\n" * (_LARGEST // 3)})
"""Bodies that are expensive unless refused early."""

Waits = dict[str, list[float]]
"""Kind of request -> latencies in seconds."""


@dataclass(frozen=True)
class Load:
    """Requests to a port and their expected translations."""

    port: int
    short: Sequence[str]
    long: Sequence[str]
    expected: Mapping[str, str] | None = None
    """Line -> translation; None: answers are not compared."""
    kinds: Mapping[str, int] = field(default_factory=STEADY.copy)
    """STEADY or MIXED."""

    def draw(self, draws: random.Random) -> str:
        return draws.choices([*self.kinds], [*self.kinds.values()])[0]

    def ask(self, kind: str, draws: random.Random) -> None:
        """Send one request of a kind; raises SystemExit if the answer is wrong."""
        texts = self.texts(kind, draws)
        if kind == "hang up":
            self._hang_up({"text": texts, "stream": draws.random() < 0.5}, draws)
        elif kind == "heavy" and draws.random() < 0.75:
            status, answer = self._answer(draws.choice(_REFUSED))
            if status != 422:
                raise SystemExit(f"a body that is too much was answered with {status} {answer[:200]!r}")
        else:
            status, answer = self._answer({"text": texts, "stream": kind == "slow"}, slowly=kind == "slow")
            received = _translations(answer, kind == "slow") if status == 200 else []
            if self.expected is None:
                right = len(received) == len(texts)
            else:
                right = received == ["\n".join(self.expected[line] for line in text.split("\n")) for text in texts]
            if not right:
                raise SystemExit(f"{texts} was answered with {status} {answer[:200]!r}")

    def texts(self, kind: str, draws: random.Random) -> list[str]:
        lines = {"short": self.short, "long": self.long, "text": self.long}.get(kind, [*self.short, *self.long])
        drawn = draws.choices(lines, k=_SENTENCES.get(kind, 8))
        return ["\n".join(drawn)] if kind == "text" else drawn

    def _answer(self, request: dict[str, Any], slowly: bool = False) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("POST", "/translate", json.dumps(request))
            response = connection.getresponse()
            read = b""
            while slowly and (part := response.read(64)):
                read += part
                time.sleep(0.01)
            return response.status, read or response.read()
        finally:
            connection.close()

    def _hang_up(self, request: dict[str, Any], draws: random.Random) -> None:
        """Close the connection in the middle of the request or of the answer, with or without a reset."""
        body = json.dumps(request).encode()
        sent = b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as client:
            client.sendall(sent[: draws.choice((20, len(sent) - 9, len(sent)))])
            time.sleep(0.1 * draws.random())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", draws.randrange(2), 0))


def _translations(answer: bytes, stream: bool) -> list[str]:
    if not stream:
        return [best[0]["text"] for best in parse_json(answer)["translations"]]
    *events, end = answer.decode().strip().split("\n\n")
    if not end.startswith("event: done"):
        return []
    return [parse_json(event.removeprefix("data: "))["translations"][0]["text"] for event in events]


def closed(load: Load, clients: int, seconds: float, seed: int, memory: Callable[[], int]) -> tuple[Waits, list[int]]:
    """Latencies with a number of clients in a closed loop, and twenty samples of memory() during the run."""
    stop = threading.Event()
    waits: Waits = {kind: [] for kind in load.kinds}

    def client(number: int) -> None:
        draws = random.Random(f"{seed} {number}")
        while not stop.is_set():
            kind, begin = load.draw(draws), time.perf_counter()
            load.ask(kind, draws)
            if not stop.is_set():
                waits[kind].append(time.perf_counter() - begin)

    held: list[int] = []
    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, number) for number in range(clients)]
        try:
            while len(held) < 20 and not wait(running, seconds / 20, FIRST_EXCEPTION).done:
                held.append(memory())
        finally:
            stop.set()
        for each in running:
            each.result()
    return waits, held


def arriving(load: Load, rate: float, seconds: float, seed: int) -> Waits:
    """Latencies of requests with Poisson arrivals of `rate` per second, counted from the scheduled send time."""
    draws, waits = random.Random(seed), Waits({kind: [] for kind in load.kinds})

    def send(kind: str, number: float, due: float) -> None:
        load.ask(kind, random.Random(number))
        waits[kind].append(time.perf_counter() - due)

    begin = time.perf_counter()
    due = begin
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        sent = []
        while (due := due + draws.expovariate(rate)) < begin + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            sent.append(pool.submit(send, load.draw(draws), draws.random(), due))
        for each in sent:
            each.result()
    return waits


def sentences(waits: Waits) -> int:
    """Number of sentences in these requests."""
    return sum(len(latencies) * _SENTENCES.get(kind, 8) for kind, latencies in waits.items())


def quantiles(seconds: Sequence[float]) -> dict[str, Any]:
    """Number of requests, and quantiles of their latency in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [*seconds, 0.0][:1] * 99
    waited = {f"p{share}_ms": round(1000 * cuts[share - 1], 1) for share in (50, 95, 99)}
    return {"requests": len(seconds), **waited}


def failed(held: Sequence[int], short: Mapping[str, Any]) -> list[str]:
    """Failed checks of memory samples and of quantiles() of short requests, a line each."""
    before, after = statistics.mean(held[5:10]), statistics.mean(held[15:])
    failures = []
    if after > MOST_GROWTH * before:
        failures.append(f"memory grew from {before:,.0f} to {after:,.0f} MiB")
    if short["p99_ms"] > MOST_SPREAD * short["p50_ms"]:
        failures.append(f"short requests: median latency {short['p50_ms']} ms, p99 {short['p99_ms']} ms")
    return failures
