"""Rows that became slower from one set of records to another, and whether that can be chance.

    python -m benchmarks compare BEFORE AFTER [--threshold 0.05]

BEFORE and AFTER are files of records, or folders. Rows of the same group, case, shape, dtype, pass and provider are
compared by the ratio of their medians, after over before. A record keeps p20, p50, p80 and the number of runs, so the
logarithm of a time is taken to be normal: its deviation is ln(p80 / p20) / 1.683, the standard error of a median of n
runs 1.253 times that over the root of n, and the interval holds the ratio with 99% as far as the spread within a run
tells. What differs from run to run (clocks, neighbours, memory layout) it cannot know; the threshold stands for that,
and the peers' rows, which did not change, show how far the machine moved.

A regression is a row of fasttfm whose whole interval lies above 1 + threshold, or one that was timed and now is wrong,
refused or absent. The exit status is 1 when there is one, else 0. Between two machines, or numbers of threads, there is
none: the ratios then tell those apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import records
from benchmarks.measure.machine import machine_name
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import Entry, Loaded, load
from benchmarks.measure.text_table import shape_text, short_dtype
from fasttfm.cli.parser import InRange, Parser
from fasttfm.errors import UserError
from ptx_check.ledger.text_table import aligned

LEAST_RUNS = 5
"""A median of fewer runs has no interval."""
_P20_TO_P80 = 1.6832  # standard deviations between the quantiles of a normal distribution
_MEDIAN = math.sqrt(math.pi / 2)  # standard error of a median in those of a mean
_NORMAL_99 = 2.5758


@dataclass(frozen=True, slots=True)
class Change:
    """One row before and after."""

    before: Entry
    after: Entry
    threshold: float

    @property
    def timed(self) -> bool:
        return self.before.timed and self.after.timed

    @property
    def alike(self) -> bool:
        """True if both were measured on as much of the same machine."""
        one, other = ((machine_name(e.machine), e.record["threads"]) for e in (self.before, self.after))
        return one == other

    @property
    def ratio(self) -> float:
        """Median after over median before: above 1 is slower."""
        return self.after.p50 / self.before.p50

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 99% interval of the ratio; None where a side has too few runs."""
        errors = [_log_error(entry.record["time_us"]) for entry in (self.before, self.after)]
        if any(error is None for error in errors):
            return None
        wide = math.exp(_NORMAL_99 * math.hypot(*(error for error in errors if error is not None)))
        return self.ratio / wide, self.ratio * wide

    @property
    def verdict(self) -> str:
        if not self.timed:
            return "" if not self.before.timed else f"now {self.after.record['status']}"
        if self.interval is None:
            return "too few runs"
        low, high = self.interval
        least, most = 1 / (1 + self.threshold), 1 + self.threshold
        if low > most:
            return "slower"
        if high < least:
            return "faster"
        return "same" if least <= low and high <= most else "unclear"

    @property
    def regression(self) -> bool:
        ours = self.after.provider.startswith(OURS)
        return ours and self.alike and (self.verdict == "slower" or self.verdict.startswith("now "))


def _log_error(times: dict[str, Any]) -> float | None:
    """Standard error of the median's logarithm."""
    if times["runs"] < LEAST_RUNS:
        return None
    return _MEDIAN * math.log(times["p80"] / times["p20"]) / _P20_TO_P80 / math.sqrt(times["runs"])


def _by_key(files: Loaded, with_machine: bool) -> dict[tuple[str, str], Entry]:
    result: dict[tuple[str, str], Entry] = {}
    for entry in files.suite:
        key = (records.key(entry.record), machine_name(entry.machine) if with_machine else "")
        if key in result:
            raise UserError(
                f"{files.folder}: {result[key].location} and {entry.location} measure the same thing: "
                "compare single files"
            )
        result[key] = entry
    return result


def changes(before: Loaded, after: Loaded, threshold: float) -> list[Change]:
    """Every row of the suite that both hold, the slowest change first.

    Where each side is of one machine the machines may differ; otherwise rows of the same machine are compared.
    """
    sides = (before, after)
    machines = [{machine_name(entry.machine) for entry in files.suite} for files in sides]
    one, other = (_by_key(files, any(len(names) > 1 for names in machines)) for files in sides)
    shared = [Change(one[key], other[key], threshold) for key in one if key in other]
    return sorted(shared, key=lambda change: (change.timed, -change.ratio if change.timed else 0.0))


def _contents(files: Loaded) -> str:
    """Return the content of a file or folder, for who is told that it cannot be compared."""
    kinds = {f"{e.record['group']} in {e.record['dtype']}" for e in files.suite}
    return f"{files.folder} ({', '.join(sorted(kinds)) or 'nothing that can be compared'})"


def notes(before: Loaded, after: Loaded, result: Sequence[Change]) -> list[str]:
    """Return what the reader of the ratios should know of the two sides."""
    said = []
    if any(not change.alike for change in result):
        said.append(
            "The two sides are not of one machine with one number of threads: ratios tell those apart, and no row is "
            "called a regression."
        )
    if all(change.before.record == change.after.record for change in result):
        said.append("Both sides hold the same records.")
    first, last = (str(f(e.machine["time"] for e in files.suite)) for f, files in ((min, before), (max, after)))
    if result and first > last:
        said.append(f"BEFORE was measured later ({first}) than AFTER ({last}): are they the wrong way round?")
    return said


def table(result: Sequence[Change]) -> str:
    rows = []
    for change in result:
        record = change.after.record
        ratio = f"{change.ratio:.3f}" if change.timed else ""
        interval = change.interval if change.timed else None
        rows.append(
            (
                record["case"],
                shape_text(record["shape"]),
                short_dtype(record["dtype"]),
                record["pass"],
                record["provider"],
                *(f"{e.p50:,.1f}" if e.timed else "" for e in (change.before, change.after)),
                ratio,
                f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "",
                change.verdict + (" (regression)" if change.regression else ""),
            )
        )
    head = ("case", "shape", "dtype", "pass", "provider", "before us", "after us", "ratio", "99% interval", "verdict")
    return aligned([head, *rows], names=5)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmarks compare", description="What became slower from one set of records to another."
    )
    parser.add_argument("before", type=Path, help="file or folder of records")
    parser.add_argument("after", type=Path, help="the same, of a later run")
    parser.add_argument(
        "--threshold",
        type=InRange(0, 10**6, float),
        default=0.05,
        help="a change up to this share is none (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    before, after = load(args.before), load(args.after)
    result = changes(before, after, args.threshold)
    if not result:
        raise UserError(f"{_contents(before)} and {_contents(after)} have no row in common")
    for name, files in (("before", before), ("after", after)):
        print(f"{name}: {', '.join(files.machines)} ({files.folder})")
    print(f"\n{table(result)}\n")
    print("\n".join(_summary(before, after, result)))
    return 1 if any(change.regression for change in result) else 0


def _summary(before: Loaded, after: Loaded, result: Sequence[Change]) -> list[str]:
    lines = notes(before, after, result)
    peers = sorted(c.ratio for c in result if c.timed and not c.after.record["provider"].startswith(OURS))
    if peers:
        lines.append(f"The {len(peers)} rows of other providers: median ratio {peers[len(peers) // 2]:.3f}.")
    unmatched = len(before.suite) + len(after.suite) - 2 * len(result)
    regressions = sum(change.regression for change in result)
    return [*lines, f"{len(result)} rows compared, {unmatched} without a partner, {regressions} regressions."]
