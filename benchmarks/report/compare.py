"""Regressions between two sets of records, with confidence intervals.

    python -m benchmarks compare BEFORE AFTER [--threshold 0.05]

BEFORE and AFTER are files or folders of records. Rows of equal group, case, shape, dtype, pass and provider are
compared by the ratio of their medians, after over before. A record has p20, p50, p80 and the number of runs n; times
are taken as log-normal with deviation ln(p80 / p20) / 1.683, the standard error of the median is 1.253 times that over
sqrt(n), and the interval covers the ratio with 99% as far as the spread within a run tells. Variation between runs
(clocks, neighbours, memory layout) is not in it: that is what the threshold is for, and the rows of peers, whose code
did not change, show how far the machine drifted.

A regression is a row of fasttfm whose whole interval is above 1 + threshold, or one that was timed and is now wrong,
refused or absent. The exit status is 1 if there is one. Between machines or numbers of threads there are none.
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
"""Fewest runs for an interval."""
_P20_TO_P80 = 1.6832  # standard deviations between these quantiles of a normal distribution
_MEDIAN = np.sqrt(np.pi / 2)  # standard error of a median over that of a mean
_NORMAL_99 = 2.5758
_KEY = [*CASE, "provider"]


def changes(before: pd.DataFrame, after: pd.DataFrame, threshold: float) -> pd.DataFrame:
    """Rows of the suite in both sets, largest slowdown first.

    Columns: those of both sets with _before and _after, ratio, its interval low and high, verdict, alike (same machine
    and number of threads), regression. Rows are matched by machine, unless each set has only one.
    """
    key = _KEY if max(side.machine.nunique() for side in (before, after)) > 1 else [k for k in _KEY if k != "machine"]
    for side in (before, after):
        twice = side[side.duplicated(key, keep=False)].groupby(key, sort=False).head(2)
        if len(twice):
            one, other = (entry.location for entry in twice.entry.iloc[:2])
            raise UserError(f"{one} and {other} are the same case: compare single files")
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
    """Whether the machines differ, the ratio of the peers' rows, and the counts of rows."""
    remarks = []
    if not result.alike.all():
        remarks.append("The machines or numbers of threads differ: no row is called a regression.")
    peers = result[result.timed & ~result.ours_after].ratio.sort_values()
    if len(peers):
        remarks.append(f"{len(peers)} rows of other providers: median ratio {peers.iloc[len(peers) // 2]:.3f}.")
    unmatched = len(before) + len(after) - 2 * len(result)
    return [*remarks, f"{len(result)} rows compared, {unmatched} unmatched, {result.regression.sum()} regressions."]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks compare", description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, help="file or folder of records")
    parser.add_argument("after", type=Path, help="file or folder of a later run")
    threshold = InRange(0, 10**6, float)
    parser.add_argument("--threshold", type=threshold, default=0.05, help="relative change (default: %(default)s)")
    args = parser.parse_args(argv)
    before, after = (suite(load(path)) for path in (args.before, args.after))
    result = changes(before, after, args.threshold)
    if result.empty:
        groups = (", ".join(sorted({*(side.group + " in " + side["dtype"])})) for side in (before, after))
        one, other = (f"{path} ({names or 'no rows'})" for path, names in zip((args.before, args.after), groups))
        raise UserError(f"{one} and {other} have no row in common")
    for name, path, side in (("before", args.before, before), ("after", args.after, after)):
        print(f"{name}: {', '.join(sorted(set(side.machine)))} ({path})")
    print(f"\n{table(result)}\n")
    print("\n".join(notes(before, after, result)))
    return 1 if result.regression.any() else 0
