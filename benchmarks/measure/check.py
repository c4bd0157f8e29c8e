"""Checks that files of records can be contributed: `python -m benchmarks check FILE...`

Beyond its schema, a record must be of a commit without local changes, not of level smoke, not faster than its device
allows, and not of a wrong result. A file with too many noisy rows is rejected. Files without the suffix of records,
such as pictures beside them, are skipped. Exit status: 0 if every file passes, 1 if one fails, 2 if one cannot be read.
Without FILE the command compares README, the report and the pictures with benchmarks/results (report/page.py).
"""

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import records
from benchmarks.measure.machine import git, machine_name, noisy
from benchmarks.measure.records import ENDING, Record
from benchmarks.measure.text_table import shape_text
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError

_MOST_SHARE = 1.05
"""Bound on the share of the roofline; more means that the time or the ceilings were measured wrongly."""
_MOST_NOISY = 0.25
"""Bound on the share of noisy rows in a file; more means that the machine was busy."""
_ROUNDED = 0.01
"""Bound on the rounding error of a quotient of two numbers of four digits."""


def problems(record: Record) -> list[str]:
    """Reasons to reject a record that follows its schema, a sentence each."""
    machine: dict[str, Any] = record.get("machine", record)  # counted records have only the commit
    result = []
    if machine.get("uncommitted_changes"):
        result.append("was measured with uncommitted changes: commit or remove them and measure again")
    commit = machine.get("commit")
    if not commit:
        result.append("has no commit: measure in a git checkout")
    elif _unknown_commit(commit):
        result.append(f"is of commit {commit[:12]}, which this checkout does not have: fetch it, or use a known one")
    if record.get("level") == "smoke":
        result.append("was measured with --smoke: use --quick, the standard level or --full")
    if record.get("status") == "wrong":
        result.append(f"has a wrong result ({record['reason']}): open an issue with it instead")
    roofline, time = record.get("roofline"), record.get("time_us")
    if roofline and time:
        share = roofline["floor_us"] / time["p50"]
        if share > _MOST_SHARE:
            result.append(f"is at {share:.2f} of the roofline, faster than the device: measure on an idle machine")
        if abs(roofline["share"] - share) > _ROUNDED * share:
            result.append(f"says {roofline['share']:.3g} of the roofline, but its floor and time give {share:.3g}")
    return result


@functools.cache
def _unknown_commit(commit: str) -> bool:
    """Return whether the commit is missing from this checkout; False for shallow clones, which cannot tell."""
    whole = git("rev-parse", "--is-shallow-repository") == "false"
    return whole and git("cat-file", "-e", f"{commit}^{{commit}}") is None


def title(record: Record) -> str:
    if "schema" not in record:
        return str(record["benchmark"])
    case = (record["group"], record["case"], shape_text(record["shape"]), record["dtype"], record["pass"])
    return f"{' '.join(case)}, {record['provider']}"


def check(path: Path) -> tuple[str, list[str]]:
    """(summary of a file, reasons to reject it). Raises UserError if it is not a file of records."""
    result = records.read(path)
    machines = [record.get("machine", record) for record in result]  # counted records have only the commit
    names = sorted({machine_name(machine).removeprefix("CPU: ") for machine in machines if "processor" in machine})
    statuses = Counter(record.get("status", "kept") for record in result)
    statuses += Counter(noisy=sum(map(noisy, result)))
    counted = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    commits = {commit for machine in machines if (commit := machine.get("commit"))}
    oldest = max((int(_commits_since(commit) or 0) for commit in commits), default=0)
    age = f"; the measured code has changed in {oldest} commits since" if oldest else ""
    summary = f"{path}: {len(result)} records ({counted or 'none'}) of {'; '.join(names) or 'no machine'}{age}"
    wrong: dict[str, list[str]] = {}
    seen: set[tuple[str, str]] = set()
    for record, machine in zip(result, machines):
        found = problems(record)
        if "schema" in record:
            measured = records.key(record), machine_name(machine)
            found += ["was already measured in the same file: keep one of them"] if measured in seen else []
            seen.add(measured)
        for problem in found:
            wrong.setdefault(problem, []).append(title(record))
    reasons = [
        f"{path}: {len(titles)} of {len(result)} records: {titles[0]}{', ...' if len(titles) > 1 else ''} {problem}"
        for problem, titles in wrong.items()
    ]
    marked = sum(record.get("noisy", False) for record in result)
    if marked > _MOST_NOISY * statuses["timed"]:
        reasons.append(f"{path}: {marked} of {statuses['timed']} rows are noisy: measure on an idle machine")
    if not result:
        reasons.append(f"{path}: no records")
    return summary, reasons


@functools.cache
def _commits_since(commit: str) -> str | None:
    """Number of commits to fasttfm and kernels since this one; None if the checkout does not have it."""
    return git("rev-list", "--count", f"{commit}..HEAD", "--", "fasttfm", "kernels")


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m benchmarks check", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files of records (JSON lines)")
    args = parser.parse_args(argv)
    files = [path for path in args.files if path.suffix == ENDING or not path.is_file()]
    if not files:
        raise UserError(f"no file of records was given: their names end in {ENDING}")
    rejected = False
    for path in files:
        summary, reasons = check(path)
        print(summary, *reasons, sep="\n")
        rejected = rejected or bool(reasons)
    if not rejected:
        print("fit to be sent in")
    return int(rejected)
