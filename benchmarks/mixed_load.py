"""Clients of all kinds at once, good and bad: `python -m benchmarks.open_loop MODEL --text in.en --mixed`.

Each client asks again as soon as it was answered, for what it draws of KINDS. Every answer is compared with what the
model translates without a server; one that differs, or does not come, ends this.
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
from dataclasses import dataclass
from typing import Any

from fasttfm.system.parsing import parse_json

CLIENTS = 64
KINDS = {"short": 12, "text": 2, "list": 2, "slow": 1, "heavy": 1, "hang up": 2}
"""What a client asks for -> how often: a short sentence, a text of long lines, a list, a list as a stream that it reads
a few bytes at a time, a body as large as is taken, or anything that it does not wait for."""
MOST_GROWTH = 1.05
"""Memory in the last quarter of the time beside that in the second quarter."""
MOST_SPREAD = 3.0
"""99th percentile of the waits of short requests beside their median."""
_PATIENCE = 120.0
_LARGEST = 1 << 20
_REFUSED = ({"text": "<" * (_LARGEST - 100)}, {"text": [""] * (_LARGEST // 5)}, {"text": "\n" * (_LARGEST // 3)})
"""Bodies that cost much where they are not refused early."""


@dataclass(frozen=True)
class Load:
    """Requests for a port, and the translations that must come."""

    port: int
    short: Sequence[str]
    long: Sequence[str]
    expected: Mapping[str, str]
    """By line."""

    def ask(self, kind: str, draws: random.Random) -> None:
        """One request of a kind; SystemExit where its answer is wrong."""
        texts = self._texts(kind, draws)
        if kind == "hang up":
            self._hang_up({"text": texts, "stream": draws.random() < 0.5}, draws)
        elif kind == "heavy" and draws.random() < 0.75:
            status, answer = self._answer(draws.choice(_REFUSED))
            if status != 422:
                raise SystemExit(f"a body that is too much was answered with {status} {answer[:200]!r}")
        else:
            status, answer = self._answer({"text": texts, "stream": kind == "slow"}, slowly=kind == "slow")
            received = _translations(answer, kind == "slow") if status == 200 else None
            if received != ["\n".join(self.expected[line] for line in text.split("\n")) for text in texts]:
                raise SystemExit(f"{texts} was answered with {status} {answer[:200]!r}")

    def _texts(self, kind: str, draws: random.Random) -> list[str]:
        if kind == "short":
            return [draws.choice(self.short)]
        if kind == "text":
            return ["\n".join(draws.choices(self.long, k=8))]
        return draws.choices([*self.short, *self.long], k=64 if kind == "heavy" else 8)

    def _answer(self, request: dict[str, Any], slowly: bool = False) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
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
        """Leave in the middle of the request or of the answer, in order or by a reset."""
        body = json.dumps(request).encode()
        sent = b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        with socket.create_connection(("127.0.0.1", self.port), timeout=_PATIENCE) as client:
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


def run(load: Load, seconds: float, seed: int, memory: Callable[[], int], clients: int = CLIENTS) -> dict[str, Any]:
    """The fields of a record of so many seconds; memory: tells the server's in MiB, and is asked twenty times."""
    stop = threading.Event()
    waits: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def client(number: int) -> None:
        draws = random.Random(f"{seed} {number}")
        while not stop.is_set():
            (kind,) = draws.choices([*KINDS], [*KINDS.values()])
            begin = time.perf_counter()
            load.ask(kind, draws)
            waits[kind].append(1000 * (time.perf_counter() - begin))

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
    rows = []
    for kind, found in waits.items():
        cuts = statistics.quantiles(found, n=100, method="inclusive") if len(found) > 1 else (found or [0.0]) * 99
        rows.append({"kind": kind, "requests": len(found), "p50_ms": round(cuts[49], 1), "p99_ms": round(cuts[98], 1)})
    return {"clients": clients, "resident_mib": held, "measured": rows, "failed": failed(held, rows[0])}


def failed(held: Sequence[int], short: Mapping[str, Any]) -> list[str]:
    """The checks that memory, and the row of short requests, do not pass, each a line."""
    before, after = statistics.mean(held[5:10]), statistics.mean(held[15:])
    found = []
    if after > MOST_GROWTH * before:
        found.append(f"memory grew from {before:,.0f} to {after:,.0f} MiB")
    if short["p99_ms"] > MOST_SPREAD * short["p50_ms"]:
        found.append(
            f"short requests waited {short['p50_ms']} ms at the median, {short['p99_ms']} at the 99th percentile"
        )
    return found
