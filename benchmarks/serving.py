"""Sentences a second that `fasttfm serve` translates for many clients at once, and how long each of them waits.

    python -m benchmarks.serving MODEL --text in.en --seconds 120 --workers 2

The server is the command in a process of its own. Clients are threads here, each with a connection that is kept, which
ask for one to four sentences at once and ask again as soon as they have the answer. Every answer is compared with what
the model translates without a server; one that differs ends the benchmark. Appends one line to
benchmarks/results/serving.jsonl.
"""

import http.client
import json
import random
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from fasttfm.children import command_line
from fasttfm.data.corpus import read_lines
from fasttfm.decoding import Translator
from fasttfm.parsing import parse_json

_LINES = 400
"""Different sentences that are asked for."""
_MOST_AT_ONCE = 4
_WARM_UP_SECONDS = 3.0
_PATIENCE = 600


class Clients:
    """Threads that ask until they are told to stop."""

    def __init__(self, port: int, expected: Mapping[str, str]) -> None:
        self.port = port
        self.expected = expected
        self.seconds: list[float] = []
        self.sentences = 0
        self.wrong: str | None = None
        self._counting = False
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def run(self, clients: int, warm_up: float, seconds: float) -> float:
        """Have so many clients ask; the seconds that were counted, after the warm-up."""
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        self._stop.wait(warm_up)
        begin, self._counting = time.perf_counter(), True
        self._stop.wait(seconds)
        self._counting = False
        counted = time.perf_counter() - begin
        self._stop.set()
        for thread in threads:
            thread.join()
        return counted

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        lines = list(self.expected)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        try:
            while not self._stop.is_set():
                texts = draw.choices(lines, k=draw.randint(1, _MOST_AT_ONCE))
                begin = time.perf_counter()
                connection.request("POST", "/translate", json.dumps({"text": texts}))
                answer = parse_json(connection.getresponse().read())
                taken = time.perf_counter() - begin
                received = [best[0]["text"] for best in answer.get("translations", [])]
                with self._lock:
                    if self._counting:
                        self.seconds.append(taken)
                        self.sentences += len(texts)
                if received != [self.expected[text] for text in texts]:
                    self.wrong = f"{texts} was answered with {answer}"
                    self._stop.set()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.wrong = f"a client failed: {error!r}"
            self._stop.set()


def measure(
    model: Path, lines: Sequence[str], *, clients: int, seconds: float, workers: str = "1"
) -> dict[str, float | str]:
    """Sentences a second and the seconds that clients waited; SystemExit where an answer is wrong."""
    expected = dict(zip(lines, Translator.from_directory(model, workers=1).translate(lines)))
    command = command_line("serve", str(model), "--port", "0", "--workers", workers)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            told = server.stdout.readline()
            if " at http://" not in told:
                raise SystemExit("fasttfm serve did not start")
            asking = Clients(int(told.rsplit(":", 1)[1]), expected)
            counted = asking.run(clients, min(_WARM_UP_SECONDS, seconds), seconds)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_PATIENCE)
    if asking.wrong is not None:
        raise SystemExit(asking.wrong)
    if len(asking.seconds) < clients:
        raise SystemExit(f"only {len(asking.seconds)} answers came: give more --seconds")
    cuts = statistics.quantiles(asking.seconds, n=100)
    return {
        "clients": clients,
        "workers": workers,
        "seconds": round(counted, 1),
        "requests": len(asking.seconds),
        "sentences": asking.sentences,
        "sentences_per_second": round(asking.sentences / counted, 1),
        "p50_ms": round(1000 * cuts[49], 1),
        "p99_ms": round(1000 * cuts[98], 1),
    }


@command.program(
    command.flag("model", type=Path, metavar="MODEL", help="model directory"),
    command.flag("--text", type=Path, required=True, help="source sentences, one a line"),
    command.flag("--clients", type=int, default=64, help="(default: %(default)s)"),
    command.flag("--seconds", type=float, default=120.0, help="(default: %(default)s)"),
    command.flag("--workers", default="1", metavar="auto|N", help="as of fasttfm serve (default: %(default)s)"),
)
def main(args: Any) -> dict[str, Any]:
    lines = list(dict.fromkeys(line for line in read_lines(args.text) if line.strip()))[:_LINES]
    measured = measure(args.model, lines, clients=args.clients, seconds=args.seconds, workers=args.workers)
    print(json.dumps(measured), flush=True)
    return {"measured": [measured]}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
