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

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.measure.records import load
from benchmarks.measure.text_table import short_dtype
from benchmarks.report.rows import CASE, suite
from fasttfm.cli.parser import InRange, Parser
from fasttfm.errors import UserError

LEAST_RUNS = 5
"""A median of fewer runs has no interval."""
_P20_TO_P80 = 1.6832  # standard deviations between the quantiles of a normal distribution
_MEDIAN = np.sqrt(np.pi / 2)  # standard error of a median in those of a mean
_NORMAL_99 = 2.5758
_KEY = [*CASE, "provider"]


def changes(before: pd.DataFrame, after: pd.DataFrame, threshold: float) -> pd.DataFrame:
    """A line for every row of the suite that both hold, the slowest change first: columns of both with _before and
    _after, ratio, low and high (of its interval), verdict, alike (measured on as much of the same machine), regression.

    Where each side is of one machine the machines may differ; otherwise rows of the same machine are compared.
    """
    key = _KEY if max(side.machine.nunique() for side in (before, after)) > 1 else [k for k in _KEY if k != "machine"]
    for side in (before, after):
        twice = side[side.duplicated(key, keep=False)].groupby(key, sort=False).head(2)
        if len(twice):
            one, other = (entry.location for entry in twice.entry.iloc[:2])
            raise UserError(f"{one} and {other} measure the same thing: compare single files")
    named = (side.assign(of=side.machine) for side in (before, after))
    both = pd.merge(*named, on=key, suffixes=("_before", "_after"))
    timed = (both.status_before == "timed") & (both.status_after == "timed")
    errors = [
        (
            _MEDIAN * np.log(both[f"p80_{side}"] / both[f"p20_{side}"]) / _P20_TO_P80 / np.sqrt(both[f"runs_{side}"])
        ).where(both[f"runs_{side}"] >= LEAST_RUNS)
        for side in ("before", "after")
    ]
    ratio, wide = both.p50_after / both.p50_before, np.exp(_NORMAL_99 * np.hypot(*errors))
    low, high = ratio / wide, ratio * wide
    least, most = 1 / (1 + threshold), 1 + threshold
    verdicts = [
        (both.status_before != "timed", ""),
        (~timed, "now " + both.status_after),
        (wide.isna(), "too few runs"),
        (low > most, "slower"),
        (high < least, "faster"),
        ((least <= low) & (high <= most), "same"),
    ]
    verdict = np.select([np.asarray(when) for when, _ in verdicts], [said for _, said in verdicts], "unclear")
    both = both.assign(ratio=ratio, low=low, high=high, verdict=verdict, timed=timed)
    both["alike"] = (both.of_before == both.of_after) & (both.threads_before == both.threads_after)
    worse = (both.verdict == "slower") | both.verdict.str.startswith("now ")
    both["regression"] = both.ours_after & both.alike & worse
    return both.sort_values(["timed", "ratio"], ascending=[True, False], kind="stable")


def table(result: pd.DataFrame) -> str:
    head = ("case", "shape", "dtype", "pass", "provider", "before us", "after us", "ratio", "99% interval", "verdict")
    times = [result[name].map("{:,.1f}".format, na_action="ignore") for name in ("p50_before", "p50_after")]
    interval = [f"{low:.3f} to {high:.3f}" if low == low else "" for low, high in zip(result.low, result.high)]
    verdict = result.verdict + np.where(result.regression, " (regression)", "")
    names = [result["case"], result.text, result["dtype"].map(short_dtype), result["pass"], result.provider]
    columns = [*names, *times, result.ratio.map("{:.3f}".format, na_action="ignore"), interval, verdict]
    return pd.DataFrame(dict(zip(head, columns))).astype(object).fillna("").to_string(index=False)


def notes(before: pd.DataFrame, after: pd.DataFrame, result: pd.DataFrame) -> list[str]:
    """Return what the reader of the ratios should know of the two sides."""
    said = []
    if not result.alike.all():
        said.append(
            "The two sides are not of one machine with one number of threads: ratios tell those apart, and no row is "
            "called a regression."
        )
    if all(one.record == other.record for one, other in zip(result.entry_before, result.entry_after)):
        said.append("Both sides hold the same records.")
    first, last = before.time.min(), after.time.max()
    if first > last:
        said.append(f"BEFORE was measured later ({first}) than AFTER ({last}): are they the wrong way round?")
    peers = result[result.timed & ~result.ours_after].ratio.sort_values()
    if len(peers):
        said.append(f"The {len(peers)} rows of other providers: median ratio {peers.iloc[len(peers) // 2]:.3f}.")
    unmatched = len(before) + len(after) - 2 * len(result)
    regressions = result.regression.sum()
    return [*said, f"{len(result)} rows compared, {unmatched} without a partner, {regressions} regressions."]


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
    before, after = (suite(load(path)) for path in (args.before, args.after))
    result = changes(before, after, args.threshold)
    if result.empty:
        held = (", ".join(sorted({*(side.group + " in " + side["dtype"])})) for side in (before, after))
        one, other = (f"{p} ({h or 'nothing that can be compared'})" for p, h in zip((args.before, args.after), held))
        raise UserError(f"{one} and {other} have no row in common")
    for name, path, side in (("before", args.before, before), ("after", args.after, after)):
        print(f"{name}: {', '.join(sorted(set(side.machine)))} ({path})")
    print(f"\n{table(result)}\n")
    print("\n".join(notes(before, after, result)))
    return 1 if result.regression.any() else 0
