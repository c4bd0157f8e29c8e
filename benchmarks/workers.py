"""One process with a thread a core beside one process a core: tokens/s, quiet and beside a busy program, in turns.

    python -m benchmarks.workers --text data/multi30k [--work FOLDER]

Trains the preset `multi30k` for --minutes by the command line, once for each (workers, neighbours) and round; the cases
take turns, so that a machine that changes its pace changes it for all. A neighbour is a Python process that counts, of
the lowest priority unless --nice says otherwise. Of a training the second half of its updates counts, because new batch
shapes take time. Appends one line to benchmarks/results/workers.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import command, end_to_end
from benchmarks.measure import machine
from benchmarks.measure.records import RESULTS
from fasttfm.cli.parser import Parser

NEIGHBOURS = (0, 1)
_CORPUS = "multi30k"


@contextmanager
def busy(neighbours: int, nice: int) -> Iterator[None]:
    """So many processes that do nothing but count."""
    program = f"import os; os.nice({nice})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(neighbours)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train(data: Path, out: Path, workers: int, minutes: float) -> dict[str, float]:
    """One training: tokens/s of its second half, updates, and peak memory of one process in bytes."""
    words = [sys.executable, "-m", "fasttfm", "train", *end_to_end.CORPORA[_CORPUS].train, "--device", "cpu"]
    words += ["--data", str(data), "--out", str(out), "--workers", str(workers), "--max-minutes", str(minutes)]
    words += ["--log-interval", "1", "--valid-interval-updates", "0", "--save-interval-updates", "0"]
    words += ["--no-tensorboard", "--average-last", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run(words, check=True, env=environment, capture_output=True)
    log = [json.loads(line) for line in (out / "train.log.jsonl").read_text().splitlines()]
    records = [record for record in log if record["kind"] == "train"]
    late = records[len(records) // 2 :]
    seconds = sum(record["target_tokens"] / record["tokens_per_second"] for record in late)
    return {
        "tokens_per_second": sum(record["target_tokens"] for record in late) / seconds,
        "updates": records[-1]["step"],
        "peak_memory": records[-1]["peak_memory"],
    }


def measure(data: Path, folder: Path, rounds: int, minutes: float, nice: int) -> list[dict[str, Any]]:
    """A row for each (workers, neighbours): tokens/s of every round, their median, and memory of one process."""
    cores = os.cpu_count() or 1
    runs: dict[tuple[int, int], list[dict[str, float]]] = {}
    for turn, neighbours, workers in itertools.product(range(rounds), NEIGHBOURS, (1, cores)):
        with busy(neighbours, nice):
            run = train(data, folder / f"{workers}-{neighbours}-{turn}", workers, minutes)
        print(f"{workers} workers, {neighbours} neighbours: {run['tokens_per_second']:,.0f} tokens/s", flush=True)
        runs.setdefault((workers, neighbours), []).append(run)
    return [
        {
            "workers": workers,
            "threads": cores // workers,
            "neighbours": neighbours,
            "tokens_per_second": round(statistics.median(run["tokens_per_second"] for run in each)),
            "tokens_per_second_of_rounds": [round(run["tokens_per_second"]) for run in each],
            "updates_of_rounds": [run["updates"] for run in each],
            "peak_memory": max(run["peak_memory"] for run in each),
        }
        for (workers, neighbours), each in runs.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.workers", description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="folder of Multi30k's train and valid files")
    parser.add_argument("--work", type=Path, help="folder for the prepared data (default: one that goes afterwards)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of all cases (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each training (default: %(default)s)")
    parser.add_argument("--nice", type=int, default=19, help="priority of the neighbours (default: the lowest)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that keeps the record")
    args: argparse.Namespace = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data = end_to_end.prepare(_CORPUS, args.text, args.work or Path(folder))
        measured = measure(data, Path(folder), args.rounds, args.minutes, args.nice)
    record = {"benchmark": "workers", "minutes": args.minutes, "nice": args.nice, "measured": measured}
    args.results.mkdir(parents=True, exist_ok=True)
    with (args.results / "workers.jsonl").open("a") as file:
        file.write(json.dumps(record | {"machine": machine.describe()}) + "\n")
    print(json.dumps(measured, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
