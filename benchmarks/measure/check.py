"""True if files of records are fit to be sent in, or taken: `python -m benchmarks check FILE...`

Beyond its schema a record must be one that somebody else can weigh: of a commit without changes on top, of a level that
is meant to be kept, no faster than the device it names can be, and with nothing wrong in it that nobody has looked at.
A file most of whose rows were timed on a busy machine is not fit either. A file with another ending than those of
records, such as a picture kept beside its record, is left out. Exit status 0 when every file is fit, 1 when one is not,
2 when one cannot be read. Without FILE the command is `report --check`: whether README, the report and the pictures say
what the records in benchmarks/results say.
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
"""Of the roofline; what exceeds it was measured wrongly, or against ceilings measured wrongly."""
_MOST_NOISY = 0.25
"""Share of a file's timed rows that may be noisy: they stand in no claim, and more of them say that the machine was
busy."""
_ROUNDED = 0.01
"""Generous bound on the rounding error of a quotient of two of a record's numbers of four digits."""


def problems(record: Record) -> list[str]:
    """Say what keeps a record that follows its schema from being taken, a sentence each."""
    machine: dict[str, Any] = record.get("machine", record)  # what is counted has the commit alone
    result = []
    if machine.get("uncommitted_changes"):
        result.append("was made with uncommitted changes: commit or remove them and run it again")
    commit = machine.get("commit")
    if not commit:
        result.append("names no commit: run it from a git checkout")
    elif _unknown_commit(commit):
        result.append(f"is of commit {commit[:12]}, which this checkout does not have: fetch it, or run on one it has")
    if record.get("level") == "smoke":
        result.append("is of --smoke, whose times mean nothing: run --quick, the standard level or --full")
    if record.get("status") == "wrong":
        result.append(f"has a wrong result ({record['reason']}): open an issue with it instead")
    roofline, time = record.get("roofline"), record.get("time_us")
    if roofline and time:
        share = roofline["floor_us"] / time["p50"]
        if share > _MOST_SHARE:
            result.append(
                f"is at {share:.2f} of the roofline: nothing can be faster than the device; run it on an idle one"
            )
        if abs(roofline["share"] - share) > _ROUNDED * share:
            result.append(f"says {roofline['share']:.3g} of the roofline, but its floor and time give {share:.3g}")
    return result


@functools.cache
def _unknown_commit(commit: str) -> bool:
    """Return whether this checkout can tell that it does not have the commit."""
    whole = git("rev-parse", "--is-shallow-repository") == "false"
    return whole and git("cat-file", "-e", f"{commit}^{{commit}}") is None


def title(record: Record) -> str:
    """The record in a few words."""
    if "schema" not in record:
        return str(record["benchmark"])
    case = (record["group"], record["case"], shape_text(record["shape"]), record["dtype"], record["pass"])
    return f"{' '.join(case)}, {record['provider']}"


def check(path: Path) -> tuple[list[str], list[str]]:
    """(what is in a file, what keeps it from being taken). Raises UserError where it is no file of records."""
    result = records.read(path)
    of = [record.get("machine", record) for record in result]  # what is counted has the commit alone
    machines = sorted({machine_name(machine).removeprefix("CPU: ") for machine in of if "processor" in machine})
    statuses = Counter(record.get("status", "kept") for record in result)
    statuses += Counter(noisy=sum(map(noisy, result)))
    counted = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    oldest = max(
        (int(_younger(commit) or 0) for commit in {machine.get("commit") for machine in of} if commit), default=0
    )
    age = f"; {oldest} commits to what they measure since" if oldest else ""
    said = f"{path}: {len(result)} records ({counted or 'none'}) of {'; '.join(machines) or 'no machine'}{age}"
    wrong: dict[str, list[str]] = {}
    seen: set[tuple[str, str]] = set()
    for record, machine in zip(result, of):
        what = problems(record)
        if "schema" in record:
            measured = records.key(record), machine_name(machine)
            what += ["was measured before in the same file: keep one of them"] if measured in seen else []
            seen.add(measured)
        for problem in what:
            wrong.setdefault(problem, []).append(title(record))
    complaints = [
        f"{path}: {len(titles)} of {len(result)} records: {titles[0]}{', ...' if len(titles) > 1 else ''} {problem}"
        for problem, titles in wrong.items()
    ]
    marked = sum(record.get("noisy", False) for record in result)
    if marked > _MOST_NOISY * statuses["timed"]:
        complaints.append(f"{path}: {marked} of {statuses['timed']} rows are marked noisy: measure on an idle machine")
    if not result:
        complaints.append(f"{path}: holds no record")
    return [said], complaints


@functools.cache
def _younger(commit: str) -> str | None:
    """Return the number of commits to package and kernels since one; None where this checkout does not know it."""
    return git("rev-list", "--count", f"{commit}..HEAD", "--", "fasttfm", "kernels")


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m benchmarks check", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files of records, JSON lines")
    args = parser.parse_args(argv)
    files = [path for path in args.files if path.suffix == ENDING or not path.is_file()]
    if not files:
        raise UserError(f"none of these is a file of records, whose names end with {ENDING}")
    fit = True
    for path in files:
        said, complaints = check(path)
        print("\n".join(said + complaints))
        fit = fit and not complaints
    if fit:
        print("fit to be sent in")
    return 0 if fit else 1
