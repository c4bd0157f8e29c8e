"""How fast ptx-check executes each kernel family, in millions of a thread's instructions a second of one CPU core.

    TRITON_INTERPRET=0 python tests/executed/speeds.py [--chip sm_80] [--times 9]

Prints a table of Markdown: of each kernel the launch's programs and threads, the instructions that its threads run, and
the least CPU time of so many executions: the first of a process that has to read the PTX, the first of one that finds
it kept, and further ones, with millions of instructions a second. Numbers are of the CPU that runs this, and tell
nothing of a GPU.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator

import torch
from executed_chips import CHIPS
from executing import Problem
from gpu.problems import _attention, _cross_entropy, _embed, _feed_forward, _norms, _rms_norm, _rotary
from mutants import Kept, kept_launches

from ptx_check.machine import translated

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
"""Large enough to fill the machine's arrays."""


def instructions(launch: Kept) -> int:
    """Run a launch once more, and count its threads' instructions."""
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
    """The least CPU seconds of so many executions of a launch with this PTX; anew: as in a process that begins."""
    seconds = []
    for _ in range(times):
        if anew:
            translated.cache_clear()
        began = time.process_time()
        launch.again(ptx)
        seconds.append(time.process_time() - began)
    return min(seconds)


def rows(chip: str, times: int) -> Iterator[str]:
    for family, problem in FAMILIES.items():
        for launch in kept_launches(problem, chip, torch.bfloat16):
            total = instructions(launch)
            new, kept, again = (
                least(launch, ptx, times, anew=anew)
                for ptx, anew in ((launch.ptx + "\n", True), (launch.ptx, True), (launch.ptx, False))
            )
            done = launch.machine.launches[-1]
            programs = done.grid[0] * done.grid[1] * done.grid[2]
            yield (
                f"| {family} | {launch.name.strip('_')} | {programs} x {done.threads} | {total / 1e6:,.1f} | "
                f"{1e3 * new:,.1f} | {1e3 * kept:,.1f} | {1e3 * again:,.1f} | {total / 1e6 / again:,.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=(*CHIPS, "sm_100", "sm_120"), default="sm_80")
    parser.add_argument("--times", type=int, default=9, help="executions of each launch (default: 9)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"PTX of {args.chip} on one core of {platform.processor() or platform.machine()}, bfloat16\n")
    print("| family | kernel | programs x threads | million instructions | first ms | kept ms | again ms | M/s again |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for row in rows(args.chip, args.times):
        print(row, flush=True)


if __name__ == "__main__":
    main()
