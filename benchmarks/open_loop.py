"""Throughput of a server, its memory, and the latency of short and long requests, by load.

    python -m benchmarks.open_loop MODEL --text in.en --seconds 60 --workers 2

A closed loop of sixteen clients first measures the capacity in requests per second. Requests then arrive at random
times (a Poisson process) at 50%, 80% and 95% of it: four of one short sentence for each of eight long ones. Latency is
counted from the scheduled send time (Tene, coordinated omission; wrk2). Each of our answers is compared with a
translation without the server; a wrong or missing one ends the program. CTranslate2, with the same weights behind the
same HTTP front end, takes the same requests, one search at a time. Both end a sentence when as many hypotheses as the
beam have ended (--early-stopping, the default).
With --mixed, clients of all kinds load our server at once (load.py); the exit status is 1 if memory grows or short
requests vary too much in latency. Its record is in mixed-load.jsonl.

Appends one line to benchmarks/results/open-loop.jsonl.
"""

import json
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.load import MIXED, PATIENCE, Load, arriving, closed, failed, quantiles, sentences
from benchmarks.measure.machine import SINCE_START, family
from benchmarks.measure.providers import CTRANSLATE2, OURS
from fasttfm.cli.main import main as fasttfm
from fasttfm.cli.parser import THREADS, InRange
from fasttfm.data.corpus import read_lines
from fasttfm.system.children import end_with_parent
from fasttfm.translate import Translator
from fasttfm.translate.translator import Translation

LOADS = (0.5, 0.8, 0.95)
"""Shares of the capacity."""
CLIENTS = 16
MIXED_CLIENTS = 64
_BURST = 64
_LINES = 300
"""Largest number of distinct sentences."""


class CTranslate2:
    """Translator for our server that runs CTranslate2, one batch at a time."""

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
        return [[Translation(" ".join(result.hypotheses[0]), 0.0, 0.0)] for result in results]


def serve(kind: str, model: Path, workers: int, folder: Path, port: Connection) -> None:
    """Serve until this process is terminated; sends the port it listens on."""
    end_with_parent()
    import torch

    from fasttfm.translate.server.app import App
    from fasttfm.translate.server.connections import Listener, server
    from fasttfm.translate.server.limits import Limits

    ours = kind == OURS
    # PyTorch's threads would slow CTranslate2's down (peers/ctranslate2.py)
    torch.set_num_threads(workers if ours else 1)
    listener = Listener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    limits = Limits(queue=100_000, seconds=PATIENCE)
    translator: Any = Translator.from_directory(model, workers=1) if ours else CTranslate2(model, folder, workers)
    app = App({"model": translator}, limits, workers=workers if ours else 1)
    port.send(listener.getsockname()[1])
    server(app, listener, limits).run(sockets=[listener])


def burst(load: Load) -> None:
    """Warm-up: many requests at once, so that first uses compile and fill caches."""
    with ThreadPoolExecutor(_BURST) as pool:
        for each in [pool.submit(load.ask, ("short", "long")[n % 5 == 4], random.Random(n)) for n in range(_BURST)]:
            each.result()


@contextmanager
def served(
    provider: str, model: Path, lines: Sequence[str], workers: int, folder: Path
) -> Iterator[tuple[Load, Callable[[], int]]]:
    """Context of a provider's warmed-up server: its Load, and a function that returns its memory in MiB.

    Short requests draw from the shortest third of the lines, long ones from the longest.
    """
    ordered = sorted(lines, key=lambda line: len(line.split()))
    third = max(1, len(ordered) // 3)
    asked = [*ordered[:third], *ordered[-third:]]
    expected = None
    if provider == OURS:
        expected = dict(zip(asked, Translator.from_directory(model, workers=1).translate(asked)))
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    arguments = (provider, model, workers, folder / "exported", theirs)
    process = processes.Process(target=serve, args=arguments, daemon=True)  # not joined at exit
    process.start()
    theirs.close()
    try:
        load = Load(ours.recv(), ordered[:third], ordered[-third:], expected)
        burst(load)
        yield load, lambda: sum(member.memory_info().rss for member in family(process.pid)) >> 20
    finally:
        with SINCE_START.ending():
            process.terminate()
            process.join()


def measure(model: Path, lines: Sequence[str], seconds: float, workers: int, seed: int) -> list[dict[str, Any]]:
    """Rows by provider and load."""
    measured = []
    for provider in (OURS, CTRANSLATE2):
        with (
            tempfile.TemporaryDirectory() as folder,
            served(provider, model, lines, workers, Path(folder)) as (load, memory),
        ):
            answered, _ = closed(load, CLIENTS, seconds, seed, memory)
            most = max(1, sum(map(len, answered.values()))) / seconds
            for share in LOADS:
                row = {"provider": provider, "load": share, "requests_per_second": round(share * most, 2)}
                for kind, waits in arriving(load, share * most, seconds, seed).items():
                    row |= {f"{kind}_{name}": value for name, value in quantiles(waits).items()}
                row |= {"sentences_per_second": round(sentences(answered) / seconds, 1), "resident_mib": memory()}
                measured.append(row)
                print(json.dumps(row), flush=True)
    return measured


def measure_mixed(model: Path, lines: Sequence[str], seconds: float, workers: int, seed: int) -> dict[str, Any]:
    """Record fields for our server under a mixed load."""
    with served(OURS, model, lines, workers, Path()) as (load, memory):
        waits, held = closed(replace(load, kinds=MIXED), MIXED_CLIENTS, seconds, seed, memory)
    rows = [{"kind": kind, **quantiles(latencies)} for kind, latencies in waits.items()]
    return {"clients": MIXED_CLIENTS, "resident_mib": held, "measured": rows, "failed": failed(held, rows[0])}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks.open_loop", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="model directory")
    parser.add_argument("--text", type=Path, required=True, help="source sentences, one per line")
    seconds = InRange(1, 10**6, float)
    parser.add_argument("--seconds", type=seconds, default=60.0, help="per load (default: %(default)s)")
    parser.add_argument("--workers", type=THREADS, default=1, help="processes; threads of CTranslate2 (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the arrivals (default: %(default)s)")
    parser.add_argument("--mixed", action="store_true", help=f"{MIXED_CLIENTS} clients of all kinds at once instead")
    args = parser.parse_args(argv)
    lines = list(dict.fromkeys(line for line in read_lines(args.text) if line.strip()))[:_LINES]
    options = {"seconds": args.seconds, "workers": args.workers, "seed": args.seed}
    if args.mixed:
        fields = measure_mixed(args.model, lines, **options)
        print(json.dumps(fields))
    else:
        fields = {"measured": measure(args.model, lines, **options)}
    name = "mixed_load" if args.mixed else "open_loop"
    command.keep(args.results, name, text=args.text.name, **options, **fields)
    return 1 if fields.get("failed") else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
