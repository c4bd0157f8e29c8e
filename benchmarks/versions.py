"""Another version's checkout and this one, the same groups of the suite in turns: is any row slower?

    python -m benchmarks.versions ../fasttfm-0.1 --rounds 2

Each round runs `python -m benchmarks --quick GROUP` in both, group by group, each in a process of its own, so that the
spread of a row holds what one run cannot know: memory layout, clocks, neighbours. Which version is first changes from
group to group. Both have glibc keep freed memory. A row of ours is slower where every median after lies more than
--threshold above every median before, faster where it is the other way round. The record keeps every median; the peers'
rows, whose code is the same on both sides, say how far the machine moved: their median beside each row of ours.
"""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import command
from benchmarks.cases import GROUPS
from benchmarks.measure import machine
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import load
from benchmarks.measure.text_table import aligned, shape_text, short_dtype
from fasttfm.errors import UserError

_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
_Row = tuple[str, str, str, str, str]
"""Case, shape, dtype, pass and provider."""
Medians = dict[_Row, list[float]]
"""Microseconds, a round each."""


def run_suite(checkout: Path, words: Sequence[str], out: Path) -> None:
    """Run `python -m benchmarks WORDS` in a checkout; UserError with its complaint."""
    environment = {**os.environ, **_MEMORY, "PYTHONPATH": str(checkout)}
    line = [sys.executable, "-m", "benchmarks", *words, "--out", os.path.relpath(out, checkout)]
    done = subprocess.run(line, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(line)} in {checkout} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def medians_of(out: Path) -> dict[_Row, float]:
    """Row -> median microseconds, of all that run_suite() has left in a folder."""
    return {
        (r["case"], shape_text(r["shape"]), short_dtype(r["dtype"]), r["pass"], r["provider"]): entry.p50
        for entry in load(out).suite
        if entry.timed
        for r in (entry.record,)
    }


def verdict(before: Sequence[float], after: Sequence[float], threshold: float) -> str:
    """slower, faster or "" for medians that the rounds do not tell apart."""
    if min(after) > (1 + threshold) * max(before):
        return "slower"
    return "faster" if min(before) > (1 + threshold) * max(after) else ""


def rows_of(before: Medians, after: Medians, threshold: float) -> list[dict[str, Any]]:
    """Return the rows that both versions timed, the slowest change first."""
    rows = [
        {
            **dict(zip(("case", "shape", "dtype", "pass", "provider"), row)),
            "before_us": before[row],
            "after_us": after[row],
            "ratio": round(median(after[row]) / median(before[row]), 3),
            "verdict": verdict(before[row], after[row], threshold),
        }
        for row in before
        if row in after
    ]
    return sorted(rows, key=lambda row: -row["ratio"])


def commit(checkout: Path) -> str:
    """The commit of a checkout; UserError where there is none of this suite."""
    result = machine.git("rev-parse", "HEAD", folder=checkout)
    if result is None or not (checkout / "benchmarks" / "__main__.py").is_file():
        raise UserError(f"{checkout} is no checkout of fasttfm: git worktree add {checkout} COMMIT makes one")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("versions", __doc__)
    parser.add_argument("checkout", type=Path, help="of the version before")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="of the suite (default: all)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of both versions; default: %(default)s")
    parser.add_argument("--level", choices=("quick", "full", "smoke"), default="quick", help="default: %(default)s")
    parser.add_argument("--threshold", type=float, default=0.03, metavar="SHARE", help="default: %(default)s")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/versions"), help="folder of the rounds' records; default: %(default)s"
    )
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.threshold < 0:
        raise UserError("--rounds wants 1 or more, --threshold 0 or more")
    checkouts = {"before": args.checkout.resolve(), "after": machine.ROOT}
    commits = {name: commit(checkout) for name, checkout in checkouts.items()}
    medians: dict[str, Medians] = {name: defaultdict(list) for name in checkouts}
    folders = [{name: args.work.resolve() / f"{name}-{n}" for name in checkouts} for n in range(1, args.rounds + 1)]
    for out in (each for folder in folders for each in folder.values()):
        if out.exists():
            raise UserError(f"{out} is there already: remove it or name another --work")
    order = list(checkouts)
    for folder in folders:
        for group in args.groups or GROUPS:
            for name in order:
                run_suite(checkouts[name], [f"--{args.level}", group], folder[name])
            order.reverse()
        for name, out in folder.items():
            for row, time in medians_of(out).items():
                medians[name][row].append(time)
            print(f"{out.name}: {len(medians[name])} rows", flush=True)
    rows = rows_of(medians["before"], medians["after"], args.threshold)
    if not rows:
        raise UserError("the two versions have no row in common")
    _tell(rows, args.threshold)
    command.keep(
        args.results, "versions", **commits, rounds=args.rounds, level=args.level, threshold=args.threshold, rows=rows
    )
    return 0


def _tell(rows: Sequence[dict[str, Any]], threshold: float) -> None:
    ours, peers = ([row for row in rows if row["provider"].startswith(OURS) == mine] for mine in (True, False))
    head = ("case", "shape", "dtype", "pass", "provider", "ratio", "verdict")
    beside = [_beside(row, peers) for row in ours]
    lines = [[*(str(row[name]) for name in head), others] for row, others in zip(ours, beside)]
    print(aligned([(*head, "others"), *lines], names=5))
    for name, group in (("ours", ours), ("the others", peers)):
        if group:
            counts = {word: sum(row["verdict"] == word for row in group) for word in ("slower", "faster")}
            print(
                f"{name}: {len(group)} rows, median ratio {median(row['ratio'] for row in group):.3f}; "
                f"{counts['slower']} slower and {counts['faster']} faster by more than {threshold:.0%} in every round"
            )


def _beside(row: dict[str, Any], peers: Sequence[dict[str, Any]]) -> str:
    """The median ratio of the peers in a row's case, which moved with the machine and the process alone."""
    work = ("case", "shape", "dtype", "pass")
    ratios = [peer["ratio"] for peer in peers if all(peer[name] == row[name] for name in work)]
    return f"{median(ratios):.3f}" if ratios else "-"


if __name__ == "__main__":
    raise SystemExit(command.run(main))
