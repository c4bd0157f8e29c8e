"""Sentences a second that `fasttfm serve` translates for many clients at once, how long each waits, and its memory.

    python -m benchmarks.serving MODEL --text in.en --seconds 600 --workers 2

The server is the command in a process of its own. Clients are threads here, each with a connection that is kept, which
ask for one to four sentences with options drawn at random and ask again as soon as they have the answer; one request of
twenty is hung up on. Every answer is compared with what the model translates without a server; one that differs, or
does not come, ends the benchmark. Resident memory of the server and its workers is read as time goes on. Appends one
line to benchmarks/results/serving.jsonl.
"""

import dataclasses
import http.client
import json
import random
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.measure.machine import SINCE_START
from fasttfm.children import child_environment, command_line
from fasttfm.cli.parser import InRange
from fasttfm.data.corpus import read_lines
from fasttfm.decoding import Translator
from fasttfm.parsing import parse_json

OPTIONS: Sequence[Mapping[str, Any]] = ({}, {"beam": 1}, {"beam": 8}, {"alpha": 1.5}, {"min_len": 12})
"""Of a request, each as often as the others."""
_LINES = 200
"""Different sentences that are asked for."""
_MOST_AT_ONCE = 4
_HUNG_UP = 0.05
"""Share of the requests whose client closes the connection in place of reading the answer."""
_READINGS = 10
"""Times that the server's memory is read."""
_WARM_UP_SECONDS = 3.0
_PATIENCE = 600


class Clients:
    """Threads that ask until they are told to stop."""

    def __init__(self, port: int, expected: Sequence[Mapping[str, str]]) -> None:
        """expected: for each of OPTIONS the translations of all lines."""
        self.port = port
        self.expected = expected
        self.seconds: list[float] = []
        self.answered = 0
        self.sentences = 0
        self.hung_up = 0
        self.wrong: str | None = None
        self._counting = False
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run(self, clients: int, warm_up: float, seconds: float, memory: Callable[[], int]) -> tuple[float, list[int]]:
        """Have so many clients ask; the seconds that were counted, after the warm-up, and the memory in ten parts.

        Both last until as many requests are answered as there are clients, at least.
        """
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        self._stop.wait(warm_up)
        self._wait_for(lambda: self.answered >= clients)
        begin, self._counting, read = time.perf_counter(), True, []
        for _ in range(_READINGS):
            self._stop.wait(seconds / _READINGS)
            read.append(memory())
        self._wait_for(lambda: len(self.seconds) >= max(2, clients))
        self._counting = False
        counted = time.perf_counter() - begin
        self._stop.set()
        for thread in threads:
            thread.join()
        return counted, read

    def _wait_for(self, enough: Callable[[], bool]) -> None:
        while not enough() and not self._stop.wait(0.01):
            pass

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        lines = list(self.expected[0])
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        try:
            while not self._stop.is_set():
                texts, option = draw.choices(lines, k=draw.randint(1, _MOST_AT_ONCE)), draw.randrange(len(OPTIONS))
                begin = time.perf_counter()
                connection.request("POST", "/translate", json.dumps({"text": texts, **OPTIONS[option]}))
                if draw.random() < _HUNG_UP:
                    self._stop.wait(0.05 * draw.random())
                    connection.close()  # the next request opens it again
                    with self._lock:
                        self.hung_up += self._counting
                    continue
                answer = parse_json(connection.getresponse().read())
                taken = time.perf_counter() - begin
                received = [best[0]["text"] for best in answer.get("translations", [])]
                with self._lock:
                    self.answered += 1
                    if self._counting:
                        self.seconds.append(taken)
                        self.sentences += len(texts)
                if received != [self.expected[option][text] for text in texts]:
                    self.wrong = f"{texts} with {OPTIONS[option]} was answered with {answer}"
                    self._stop.set()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.wrong = f"a client failed: {error!r}"
            self._stop.set()


def resident_mib(process: int) -> int:
    """MiB that a process and its descendants hold, shared pages with each of them; Linux."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    own = next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
    children = Path(f"/proc/{process}").glob("task/*/children")
    return own + sum(resident_mib(int(child)) for file in children for child in file.read_text("utf-8").split())


def measure(model: Path, lines: Sequence[str], *, clients: int, seconds: float, workers: str = "1") -> dict[str, Any]:
    """The fields of the record of a load; SystemExit where an answer is wrong."""
    translator = Translator.from_directory(model, workers=1)
    plain, expected = translator.config, []
    for options in OPTIONS:
        translator.config = dataclasses.replace(plain, **options)
        expected.append(dict(zip(lines, translator.translate(lines))))
    command = command_line("serve", str(model), "--port", "0", "--workers", workers)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())
    try:
        assert server.stdout is not None
        told = server.stdout.readline()
        if " at http://" not in told:
            raise SystemExit("fasttfm serve did not start")
        asking = Clients(int(told.rsplit(":", 1)[1]), expected)
        counted, memory = asking.run(clients, min(_WARM_UP_SECONDS, seconds), seconds, lambda: resident_mib(server.pid))
    finally:
        with SINCE_START.ending():
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=_PATIENCE)
    if asking.wrong is not None:
        raise SystemExit(asking.wrong)
    cuts = statistics.quantiles(asking.seconds, n=100)
    return {
        "clients": clients,
        "workers": workers,
        "seconds": round(counted, 1),
        "requests": len(asking.seconds),
        "sentences": asking.sentences,
        "sentences_per_second": round(asking.sentences / counted, 1),
        "hung_up": asking.hung_up,
        "resident_mib": memory,
        "p50_ms": round(1000 * cuts[49], 1),
        "p99_ms": round(1000 * cuts[98], 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks.serving", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="model directory")
    parser.add_argument("--text", type=Path, required=True, help="source sentences, one a line")
    parser.add_argument("--clients", type=InRange(1, 10_000), default=64, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=InRange(1, 10**6, float), default=600.0, help="(default: %(default)s)")
    parser.add_argument("--workers", default="1", metavar="auto|N", help="as of fasttfm serve (default: %(default)s)")
    args = parser.parse_args(argv)
    lines = list(dict.fromkeys(line for line in read_lines(args.text) if line.strip()))[:_LINES]
    measured = measure(args.model, lines, clients=args.clients, seconds=args.seconds, workers=args.workers)
    print(json.dumps(measured), flush=True)
    command.keep(args.results, "serving", text=args.text.name, measured=[measured])
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
