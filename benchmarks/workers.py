"""One process with a thread a core beside one process a core: tokens/s, quiet and beside a busy program, in turns.

    python -m benchmarks.workers --text data/multi30k [--work FOLDER]

Trains the preset `multi30k` for --minutes by the command line, once for each (workers, neighbours) and round; the cases
take turns, so that a machine that changes its pace changes it for all. A neighbour is a Python process that counts, of
the lowest priority unless --nice says otherwise. Of a training the second half of its updates counts, because new batch
shapes take time. Appends one line to benchmarks/results/workers.jsonl.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import command, end_to_end

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


def train(data: Path, out: Path, workers: int, minutes: float) -> dict[str, Any]:
    """One training by so many processes."""
    return command.timed_training(
        *("train", *end_to_end.CORPORA[_CORPUS].train, "--device", "cpu", "--data", data),
        *("--workers", workers, "--average-last", 0),
        out=out,
        minutes=minutes,
    )


def measure(data: Path, folder: Path, rounds: int, minutes: float, nice: int) -> list[dict[str, Any]]:
    """A row for each (workers, neighbours): tokens/s of every round, their median, and memory of one process."""
    cores = os.cpu_count() or 1
    runs: dict[tuple[int, int], list[dict[str, Any]]] = {}
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


@command.program(
    command.flag("--text", type=Path, required=True, help="folder of Multi30k's train and valid files"),
    command.flag("--work", type=Path, help="folder for the prepared data (default: one that goes afterwards)"),
    command.rounds(3, "all cases"),
    command.minutes(2.0, "training"),
    command.flag("--nice", type=int, default=19, help="priority of the neighbours (default: the lowest)"),
)
def main(args: Any) -> dict[str, Any]:
    data = end_to_end.prepare(_CORPUS, args.text, args.work or args.folder)
    measured = measure(data, args.folder, args.rounds, args.minutes, args.nice)
    print(json.dumps(measured, indent=2))
    return {"measured": measured}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
