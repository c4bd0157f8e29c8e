"""Cost of planning the batches of a large corpus: seconds and peak memory of a rank, by pairs.

    nice python -m benchmarks.planning --pairs 1000000 10000000

The lengths are synthetic, spread like WMT14's (benchmarks.cases.synthetic); the files are those that `fasttfm
prepare` writes, with zeros for ids. In a process of its own for each size the pairs are opened, the batches of preset
paper-base planned, and an epoch's order and first 1,000 batches made. Peak memory is what Linux tells, less what the
process had before it opened the pairs. Appends one line to benchmarks/results/planning.jsonl.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.cases.synthetic import WMT
from fasttfm.config.data import DataConfig
from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import ParallelTokens, StoredIds
from fasttfm.parsing import parse_json
from fasttfm.presets import preset_section

PRESET = "paper-base"
_FIRST = 1000


def write_pairs(folder: Path, pairs: int) -> None:
    """The ids and offsets of both sides; ids are a hole in their file."""
    random = np.random.default_rng(0)
    source = np.exp(random.normal(np.log(WMT.median), WMT.spread, pairs))
    for side, lengths in (("src", source), ("tgt", source * np.exp(random.normal(0.0, WMT.tied, pairs)))):
        offsets = np.zeros(pairs + 1, np.int64)
        np.cumsum(np.clip(np.rint(lengths), 1, WMT.longest).astype(np.int64), out=offsets[1:])
        np.save(folder / f"{side}.offsets.npy", offsets)
        with (folder / f"{side}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<u2", "fortran_order": False, "shape": (int(offsets[-1]),)}
            )
            file.truncate(file.tell() + 2 * int(offsets[-1]))


def memory(field: str) -> int:
    """Bytes that Linux tells of this process: VmRSS now, VmHWM at most. Not getrusage, which knows of its parent's."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def plan(folder: Path) -> dict[str, Any]:
    """Open the pairs in a folder and plan their batches, in this process."""
    data, training = DataConfig(**preset_section(PRESET, "data")), TrainingConfig(**preset_section(PRESET, "training"))
    before, times = memory("VmRSS"), [time.perf_counter()]
    files = [folder / f"{side}{end}" for side in ("src", "tgt") for end in (".npy", ".offsets.npy")]
    source, source_offsets, target, target_offsets = (StoredIds(file, (np.uint16, np.int64)) for file in files)
    pairs = ParallelTokens(source, source_offsets, target, target_offsets)
    times.append(time.perf_counter())
    batches = TokenBatches(
        pairs, data.max_tokens, training.seed, data.max_sentence_tokens, together=training.update_freq
    )
    times.append(time.perf_counter())
    order = batches.epoch(0)
    for number in range(min(_FIRST, len(order))):
        order[number]
    times.append(time.perf_counter())
    names = ("seconds_to_open", "seconds_to_plan", "seconds_to_begin_an_epoch")
    used = memory("VmHWM") - before
    return {
        "pairs": len(pairs),
        "batches": len(batches),
        **{name: round(after - begin, 2) for name, begin, after in zip(names, times, times[1:])},
        "peak_mb": round(used / 1e6, 1),
        "bytes_a_pair": round(used / len(pairs), 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("planning", __doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1_000_000], help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="plan what lies there, in this process, and print it")
    args = parser.parse_args(argv)
    if args.folder is not None:
        json.dump(plan(args.folder), sys.stdout)
        return 0
    measured = []
    for pairs in args.pairs:
        with tempfile.TemporaryDirectory() as folder:
            write_pairs(Path(folder), pairs)
            measured.append(parse_json(command.python("benchmarks.planning", "--folder", folder)))
        print(measured[-1], flush=True)
    command.keep(args.results, "planning", preset=PRESET, measured=measured)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
