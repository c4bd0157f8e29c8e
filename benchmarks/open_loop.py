"""Sentences a second of a server, its memory, and what short requests wait beside long ones, by load.

    python -m benchmarks.open_loop MODEL --text in.en --seconds 60 --workers 2

Requests come at random times (a Poisson process), four of one short sentence for each of eight long ones. First the
capacity is found: how many a second are answered while sixteen clients ask again as soon as they are answered. Then
requests come at half, 80% and 95% of it. Times count from the moment that a request should have been sent. Every answer
of ours is compared with what the model translates without a server; one that differs or does not come ends this.
CTranslate2, with the same weights behind the same HTTP front, takes the same requests, one search after the other as it
is made for. It ends a sentence's search when as many hypotheses as the beam has have ended; ours is measured with this
rule (--early-stopping) and with its own.
With --mixed, clients of all kinds ask ours at once instead (mixed_load.py), and it ends with 1 where memory grows or
short requests wait unevenly; its record is in mixed-load.jsonl.

Appends one line to benchmarks/results/open-loop.jsonl. Source of the method: Tene, coordinated omission (wrk2).
"""

import http.client
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import command, mixed_load
from benchmarks.measure.machine import SINCE_START, family
from fasttfm.cli.main import main as fasttfm
from fasttfm.cli.parser import THREADS, InRange
from fasttfm.data.corpus import read_lines
from fasttfm.system.children import end_with_parent
from fasttfm.system.parsing import parse_json
from fasttfm.translate import Translator
from fasttfm.translate.translator import Translation

LOADS = (0.5, 0.8, 0.95)
"""Shares of the capacity."""
EARLY_STOPPING = {"fasttfm": False, "fasttfm, early stopping": True}
"""Our providers."""
_CLIENTS = 16
_MOST_AT_ONCE = 256
_BURST = 64
_LINES = 300
"""Different sentences that are asked for, at most."""
_LONG = 8
"""Sentences of a long request."""
_SHORT_REQUESTS = 0.8
"""Share of the requests that have one short sentence."""
_PATIENCE = 120.0


@dataclass(frozen=True)
class Requests:
    """The sentences that are asked for: the shortest third of a text and its longest third."""

    short: list[str]
    long: list[str]

    @classmethod
    def from_lines(cls, lines: Sequence[str]) -> "Requests":
        ordered = sorted(lines, key=lambda line: len(line.split()))
        third = max(1, len(ordered) // 3)
        return cls(ordered[:third], ordered[-third:])

    def draw(self, draws: random.Random) -> tuple[str, list[str]]:
        """A kind of request, and its texts."""
        if draws.random() < _SHORT_REQUESTS:
            return "short", [draws.choice(self.short)]
        return "long", draws.choices(self.long, k=_LONG)


class CTranslate2:
    """A translator for our server that asks CTranslate2 for one batch after the other."""

    def __init__(self, model: Path, folder: Path, workers: int) -> None:
        import ctranslate2
        import sentencepiece

        if fasttfm(["export", str(model), "--format", "ctranslate2", "--out", str(folder), "--quiet"]):
            raise SystemExit("the model cannot be exported to CTranslate2")
        ours = Translator.from_directory(model, workers=1)
        self.model, self.config = ours.model, ours.config
        self.source_tokenizer, self.target_tokenizer = ours.source_tokenizer, ours.target_tokenizer
        self._source = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
        self._translator = ctranslate2.Translator(str(folder), intra_threads=workers)

    def translate_nbest(self, lines: list[str], *_: Any) -> list[list[Translation]]:
        pieces = [self._source.encode(line, out_type=str) for line in lines]
        results = self._translator.translate_batch(
            pieces,
            beam_size=self.config.beam,
            max_decoding_length=max(map(len, pieces)) + self.config.max_len_b,
            disable_unk=True,
            suppress_sequences=[["<blank>"], ["<s>"]],
        )
        return [[Translation(" ".join(each.hypotheses[0]), 0.0, 0.0)] for each in results]


def serve(kind: str, model: Path, workers: int, folder: Path, port: Connection) -> None:
    """Answer requests until this process is ended; sends the port that it listens at."""
    end_with_parent()
    import torch

    from fasttfm.translate.server.app import App
    from fasttfm.translate.server.connections import Listener, server
    from fasttfm.translate.server.limits import Limits

    ours = kind in EARLY_STOPPING
    torch.set_num_threads(
        workers if ours else 1
    )  # PyTorch's threads would slow CTranslate2's down (peers/ctranslate2.py)
    listener = Listener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    limits = Limits(queue=100_000, seconds=_PATIENCE)
    translator: Any = translator_of(kind, model) if ours else CTranslate2(model, folder, workers)
    app = App({"model": translator}, limits, workers=workers if ours else 1)
    port.send(listener.getsockname()[1])
    server(app, listener, limits).run(sockets=[listener])


def translator_of(kind: str, model: Path) -> Translator:
    """One of our providers."""
    translator = Translator.from_directory(model, workers=1)
    translator.config = replace(translator.config, early_stopping=EARLY_STOPPING[kind])
    return translator


class Server:
    """A server that is asked, and the answers that it must give: by line; None: any."""

    def __init__(self, port: int, expected: Mapping[str, str] | None = None) -> None:
        self.port, self.expected = port, expected

    def ask(self, texts: Sequence[str]) -> None:
        """Have the texts translated. SystemExit where the answer is another than expected, or none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        try:
            connection.request("POST", "/translate", json.dumps({"text": texts}))
            answer = connection.getresponse().read()
        finally:
            connection.close()
        received = [best[0]["text"] for best in parse_json(answer).get("translations", ())]
        wanted = received if self.expected is None else [self.expected[text] for text in texts]
        if len(received) != len(texts) or received != wanted:
            raise SystemExit(f"{texts} was answered with {answer[:200]!r}")


def burst(server: Server, requests: Requests) -> None:
    """Many requests at once, so that what is found out or compiled at its first use has been."""
    draws = random.Random(0)
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        for each in [pool.submit(server.ask, requests.draw(draws)[1]) for _ in range(_BURST)]:
            each.result()


def capacity(server: Server, requests: Requests, seconds: float) -> tuple[float, float]:
    """Requests and sentences a second that are answered while clients ask again at once."""
    stop, answered = threading.Event(), [(0, 0)] * _CLIENTS

    def client(number: int) -> None:
        draws = random.Random(number)
        while not stop.is_set():
            _, texts = requests.draw(draws)
            server.ask(texts)
            if not stop.is_set():
                done, sentences = answered[number]
                answered[number] = done + 1, sentences + len(texts)

    with ThreadPoolExecutor(_CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(_CLIENTS)]
        try:
            stop.wait(seconds)
        finally:
            stop.set()
        for each in clients:
            each.result()
    requests_done, sentences = (sum(each) for each in zip(*answered))
    return max(requests_done, 1) / seconds, sentences / seconds


def waits(server: Server, requests: Requests, rate: float, seconds: float, seed: int) -> dict[str, list[float]]:
    """Seconds from when each request should have been sent to its answer, by the kind of request."""
    draws = random.Random(seed)
    found: dict[str, list[float]] = {"short": [], "long": []}

    def send(kind: str, texts: Sequence[str], due: float) -> None:
        server.ask(texts)
        found[kind].append(time.perf_counter() - due)

    begin = time.perf_counter()
    due = begin
    sent = []
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        while (due := due + draws.expovariate(rate)) < begin + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            sent.append(pool.submit(send, *requests.draw(draws), due))
        for each in sent:
            each.result()
    return found


def row_of(provider: str, load: float, rate: float, found: dict[str, list[float]]) -> dict[str, Any]:
    """Return the record of a load; milliseconds."""
    row: dict[str, Any] = {"provider": provider, "load": load, "requests_per_second": round(rate, 2)}
    for kind, seconds in found.items():
        row[f"{kind}_requests"] = len(seconds)
        cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
        for name, place in (("p50", 49), ("p95", 94), ("p99", 98)):
            row[f"{kind}_{name}_ms"] = round(1000 * cuts[place], 1) if cuts else 0.0
    return row


@contextmanager
def served(provider: str, model: Path, workers: int, folder: Path) -> Iterator[tuple[int, Callable[[], int]]]:
    """The port of a provider's server, and what tells its memory in MiB; it ends with the block."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    target = partial(serve, provider, model, workers, folder / "exported", theirs)
    process = processes.Process(target=target, daemon=True)  # this program waits for no other at its end
    process.start()
    theirs.close()
    try:
        yield ours.recv(), lambda: sum(each.memory_info().rss for each in family(process.pid)) >> 20
    finally:
        with SINCE_START.ending():
            process.terminate()
            process.join()


def measure(
    model: Path, lines: Sequence[str], seconds: float, workers: int, seed: int, folder: Path
) -> list[dict[str, Any]]:
    """A row for each provider and load."""
    requests = Requests.from_lines(lines)
    measured = []
    for provider in (*EARLY_STOPPING, "CTranslate2"):
        expected = expected_of(provider, model, requests) if provider in EARLY_STOPPING else None
        with served(provider, model, workers, folder) as (port, memory):
            server = Server(port, expected)
            burst(server, requests)
            most, sentences = capacity(server, requests, seconds)
            for load in LOADS:
                rate = load * most
                row = row_of(provider, load, rate, waits(server, requests, rate, seconds, seed))
                measured.append(row | {"sentences_per_second": round(sentences, 1), "resident_mib": memory()})
                print(json.dumps(measured[-1]), flush=True)
    return measured


def measure_mixed(
    model: Path, lines: Sequence[str], seconds: float, workers: int, seed: int, folder: Path
) -> dict[str, Any]:
    """The fields of a record of our server under a mixed load."""
    provider, requests = "fasttfm", Requests.from_lines(lines)
    expected = expected_of(provider, model, requests)
    with served(provider, model, workers, folder) as (port, memory):
        burst(Server(port, expected), requests)
        load = mixed_load.Load(port, requests.short, requests.long, expected)
        return mixed_load.run(load, seconds, seed, memory)


def expected_of(provider: str, model: Path, requests: Requests) -> dict[str, str]:
    """Each line with its translation by one of our providers."""
    asked = [*requests.short, *requests.long]
    return dict(zip(asked, translator_of(provider, model).translate(asked)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks.open_loop", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="model directory")
    parser.add_argument("--text", type=Path, required=True, help="source sentences, one a line")
    parser.add_argument(
        "--seconds", type=InRange(1, 10**6, float), default=60.0, help="of each load (default: %(default)s)"
    )
    parser.add_argument("--workers", type=THREADS, default=1, help="processes; of CTranslate2 threads (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default: %(default)s)")
    parser.add_argument(
        "--mixed", action="store_true", help=f"{mixed_load.CLIENTS} clients of all kinds at once instead"
    )
    args = parser.parse_args(argv)
    lines = list(dict.fromkeys(line for line in read_lines(args.text) if line.strip()))[:_LINES]
    options = {"seconds": args.seconds, "workers": args.workers, "seed": args.seed}
    with tempfile.TemporaryDirectory() as folder:
        if args.mixed:
            fields = measure_mixed(args.model, lines, folder=Path(folder), **options)
            command.keep(args.results, "mixed_load", text=args.text.name, **options, **fields)
            print(json.dumps(fields))
            return 1 if fields["failed"] else 0
        measured = measure(args.model, lines, folder=Path(folder), **options)
    command.keep(args.results, "open_loop", text=args.text.name, **options, measured=measured)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
