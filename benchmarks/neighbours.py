"""Training beside busy programs: tokens/s on a quiet machine, beside one busy loop and beside two, in turns.

    python -m benchmarks.neighbours

Trains the preset `demo` on its corpus by the command line, once for each (OpenMP's waiting, number of neighbours) and
round; the cases take turns, so that a machine that changes its pace changes it for all. `chosen` is what the command
line sets by itself, `default` what OpenMP and oneDNN do without. A neighbour is a Python process that counts, of equal
priority or, with --nice 19, of the lowest. Of a training the median of its records' tokens/s counts, the first two left
out. Appends one line to benchmarks/results/neighbours.jsonl.
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

from benchmarks.measure import machine

RESULTS = Path(__file__).with_name("results")
NEIGHBOURS = (0, 1, 2)
WAITING: dict[str, dict[str, str]] = {
    "chosen": {},
    "default": {
        "KMP_BLOCKTIME": "200",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024",
        "LRU_CACHE_CAPACITY": "1024",
    },
}
"""Name -> environment. KMP_BLOCKTIME has its own default, which keeps the command line from choosing."""
_WARMING_UP = 2  # records


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


def prepared(folder: Path) -> Path:
    """The demo corpus, prepared."""
    text, data = folder / "text", folder / "DATA"
    fasttfm = [sys.executable, "-m", "fasttfm"]
    subprocess.run([*fasttfm, "demo-data", "--out", str(text)], check=True, stdout=subprocess.DEVNULL)
    words = [*fasttfm, "prepare", "--out", str(data)]
    for flag, name in (("src", "train.en"), ("tgt", "train.de"), ("valid-src", "valid.en"), ("valid-tgt", "valid.de")):
        words += [f"--{flag}", str(text / name)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return data


def train(data: Path, out: Path, updates: int, threads: int, environment: dict[str, str]) -> dict[str, float]:
    """One training: median tokens/s, and the last record's peak memory in bytes and number of batch shapes."""
    words = [sys.executable, "-m", "fasttfm", "train", "--preset", "demo", "--device", "cpu", "--no-tensorboard"]
    words += ["--data", str(data), "--out", str(out), "--max-update", str(updates), "--threads", str(threads)]
    words += ["--workers", "1"]
    words += ["--log-interval", "10", "--valid-interval-updates", "0", "--save-interval-updates", "0"]
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", *WAITING["default"])
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    subprocess.run(words, check=True, env={**inherited, **environment}, capture_output=True)
    records = [json.loads(line) for line in (out / "train.log.jsonl").read_text().splitlines()]
    rates = [record["tokens_per_second"] for record in records if record["kind"] == "train"]
    last = records[-1]
    return {
        "tokens_per_second": statistics.median(rates[_WARMING_UP:] or rates),
        "peak_memory": last["peak_memory"],
        "batch_shapes": last["batch_shapes"],
    }


def measure(rounds: int, updates: int, threads: int, nice: int) -> list[dict[str, Any]]:
    """A row for each (waiting, neighbours): tokens/s of every round and their median, the largest peak memory."""
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(Path(folder))
        for turn, neighbours, waiting in itertools.product(range(rounds), NEIGHBOURS, WAITING):
            out = Path(folder) / f"{waiting}-{neighbours}-{turn}"
            with busy(neighbours, nice):
                runs.setdefault((waiting, neighbours), []).append(train(data, out, updates, threads, WAITING[waiting]))
    return [
        {
            "waiting": waiting,
            "neighbours": neighbours,
            "tokens_per_second": statistics.median(run["tokens_per_second"] for run in each),
            "tokens_per_second_of_rounds": [run["tokens_per_second"] for run in each],
            "peak_memory": max(run["peak_memory"] for run in each),
            "batch_shapes": each[0]["batch_shapes"],
        }
        for (waiting, neighbours), each in runs.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of all cases; default: %(default)s")
    parser.add_argument("--updates", type=int, default=150, help="of each training; default: %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="of a training; default: torch's choice")
    parser.add_argument("--nice", type=int, default=0, help="priority of the neighbours, 19 the lowest; default: ours")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that keeps the record")
    args = parser.parse_args(argv)
    record = {
        "benchmark": "neighbours",
        "updates": args.updates,
        "threads": args.threads,
        "nice": args.nice,
        "measured": measure(args.rounds, args.updates, args.threads, args.nice),
        "machine": machine.describe(),
    }
    args.results.mkdir(parents=True, exist_ok=True)
    with (args.results / "neighbours.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
