"""Speed of ptx-check for each kernel family, in millions of thread instructions per second on one CPU core.

    TRITON_INTERPRET=0 python -m tests.executed.speeds [--chip sm_80] [--times 9]

Counts the instructions that the threads of each launch run, and measures the least CPU time of several executions: the
first in a process that parses the PTX, the first in one that finds it cached, and further ones. Records a line for the
chip in benchmarks/results/ptx-speeds.jsonl and updates the table of docs/ptx.md. The numbers are of this CPU, and say
nothing about a GPU.
"""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from benchmarks.measure import machine, text_table
from benchmarks.measure.records import RESULTS, Record, read
from ptx_check.machine import translated

sys.path[:0] = [str(Path(__file__).parent)]

from executing import CHIPS, Problem, solving  # noqa: E402
from gpu.problems import _attention, _cross_entropy, _embed, _feed_forward, _norms, _rms_norm, _rotary  # noqa: E402
from mutants import Kept, kept_launches  # noqa: E402

FAMILIES: dict[str, Problem] = {
    "attention": _attention(2, 4, 256, 256, 64, 64, causal=True, p=0.1),
    "attention, short rows": _attention(16, 4, 27, 27, 64, 64, p=0.1),
    "feed-forward": _feed_forward(512, 256, 1024, 0.1),
    "layer norm": _norms(1024, 512, 0.1)[1],
    "RMS norm": _rms_norm(1024, 512, 0.1),
    "rotary": _rotary(2, 4, 256, 64, 32, interleaved=False),
    "cross entropy": _cross_entropy(256, 64, 4096)[0],
    "embedding": _embed(16, 64, 512, 1000, 0.1),
}
"""Problems large enough to fill the arrays of the machine."""


def instructions(launch: Kept) -> int:
    """Runs a launch again and counts the instructions of its threads."""
    code = translated(launch.ptx)
    plain, total = code.functions, 0

    def counting(block: int):
        length, run_block = len(code.kernel.blocks[block].instructions), plain[block]

        def counted(run, registers, threads):
            nonlocal total
            active = 1 if run.active is None else run.spread(run.active).mean()
            total += round(length * run.programs * run.width * active)
            return run_block(run, registers, threads)

        return counted

    code.functions = [counting(block) for block in range(len(plain))]
    launch.again(launch.ptx)
    code.functions = plain
    return total


def least(launch: Kept, ptx: str, times: int, *, anew: bool) -> float:
    """Least CPU time in seconds of several executions with this PTX; anew: as in a new process."""
    seconds = []
    for _ in range(times):
        if anew:
            translated.cache_clear()
        began = time.process_time()
        launch.again(ptx)
        seconds.append(time.process_time() - began)
    return min(seconds)


def measured(chip: str, times: int) -> Iterator[dict[str, Any]]:
    """A row per kernel of every family: CPU milliseconds, and instructions of the threads of a launch."""
    for family, problem in FAMILIES.items():
        for launch in kept_launches(solving(problem, torch.bfloat16), chip):
            instructions_run = instructions(launch)
            new, kept, again = (
                round(1e3 * least(launch, ptx, times, anew=anew), 1)
                for ptx, anew in ((launch.ptx + "\n", True), (launch.ptx, True), (launch.ptx, False))
            )
            done = launch.machine.launches[-1]
            yield {
                "family": family, "kernel": launch.name.strip("_"), "programs": math.prod(done.grid),
                "threads": done.threads, "instructions": instructions_run,
                "first_ms": new, "kept_ms": kept, "again_ms": again,
            }  # fmt: skip


HEAD = ("family", "kernel", "programs x threads", "million instructions", "first", "first, kept", "again", "M/s again")


def table(record: Record) -> str:
    """The rows of a record as Markdown."""
    lines = []
    for row in record["kernels"]:
        millions = row["instructions"] / 1e6
        cells = (f"{row['programs']} x {row['threads']}", f"{millions:,.1f}")
        cells += tuple(f"{row[name]:,.0f}" for name in ("first_ms", "kept_ms", "again_ms"))
        lines.append((row["family"], row["kernel"], *cells, f"{1e3 * millions / row['again_ms']:,.0f}"))
    return text_table.markdown(HEAD, lines, names=2)


PAGE = machine.ROOT / "docs" / "ptx.md"
BEGIN, END = "<!-- speeds: python -m tests.executed.speeds -->", "<!-- end of speeds -->"


def section(records: Iterable[Record]) -> str:
    """The text of docs/ptx.md between BEGIN and END."""
    parts = []
    for record in records:
        about = record["machine"]
        told = f"{record['chip']} in bfloat16, all checks on, on a core of an {about['processor']}"
        parts += [f"CPU time in ms of launches for {told} (commit {about['commit'][:7]}). It says nothing about a GPU."]
        parts += [table(record)]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.executed.speeds", __doc__)
    parser.add_argument("--chip", choices=(*CHIPS, "sm_100", "sm_120"), default="sm_80")
    parser.add_argument("--times", type=int, default=9, help="executions of each launch (default: 9)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    kernels = list(measured(args.chip, args.times))
    record = command.keep(
        args.results, "ptx_speeds", key=itemgetter("chip"), chip=args.chip, times=args.times, kernels=kernels
    )
    print(table(record))
    if args.results == RESULTS:
        content = f"\n\n{section(read(RESULTS / 'ptx-speeds.jsonl'))}\n\n"
        text = text_table.replaced(PAGE.read_text(encoding="utf-8"), BEGIN, END, content)
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
