"""Cycles that the kernels' machine code takes on each unit of a chip, counted without a GPU: lower bounds, not times.

    ledger --kernels attention --chips sm_80,sm_90   every loop of these cases
    ledger --record benchmarks/results/ledger.jsonl  count and record these cases
    ledger --against benchmarks/results/ledger.jsonl cases that have grown by more than 3% since the record
    ledger --search attention.forward --chips sm_80  tiles of a case, best first

ledger stands for python -m fasttfm.kernels.proof.ledger; `ptx-check ledger` counts other people's kernels.
docs/ledger.md explains the counts.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import matrix
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import record, report, search
from fasttfm.kernels.proof.ledger.report import Row


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    named = _names(args.chips)
    if unknown := [name for name in named if name not in CHIPS]:
        parser.error(f"unknown chip {', '.join(unknown)}: choose from {', '.join(CHIPS)}")
    for begin in _names(args.kernels) + _names(args.search or ""):
        if not any(family.startswith(begin) for family in matrix.families()):
            parser.error(f"no kernel file starts with {begin}: choose from {', '.join(matrix.families())}")
    if sum(map(bool, (args.search, args.record, args.against))) > 1:
        parser.error("--search, --record and --against exclude each other")
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers {args.workers}: must be at least 1")
    try:
        args.match = re.compile(args.match)
    except re.error as error:
        parser.error(f"--match {args.match!r} is not a regular expression: {error}")
    if args.against and not args.against.is_file():
        parser.error(f"there is no file {args.against}")
    if args.record and (args.record.is_dir() or not args.record.parent.is_dir()):
        parser.error(f"--record {args.record}: must be a file in an existing folder")
    return _search(args, named) if args.search else _cases(parser, args, named)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fasttfm.kernels.proof.ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kernels", default="", help="comma-separated prefixes of kernel files (default: all)")
    parser.add_argument("--chips", default="", help="comma-separated (default: all)")
    parser.add_argument("--match", default="", help="only cases whose name and dtype match this regular expression")
    parser.add_argument(
        "--search",
        metavar="FAMILY",
        help="such as attention.forward: every tile of its first case, or of each case of --match",
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="record the counts as JSON, one line per chip")
    parser.add_argument("--against", type=Path, metavar="FILE", help="list the cases that have grown since this record")
    parser.add_argument("--workers", type=int, help="parallel processes (default: one per core)")
    return parser


def _failed(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def _listed(args: argparse.Namespace, named: Sequence[str], kernels: str) -> dict[matrix.Task, CompileCase]:
    listed = matrix.enumerate_cases([CHIPS[name] for name in named or CHIPS], _names(kernels))
    return {task: case for task, case in listed if args.match.search(f"{case.name} {case.dtype}")}


def _cases(parser: argparse.ArgumentParser, args: argparse.Namespace, named: Sequence[str]) -> int:
    cases = _listed(args, named, args.kernels)
    if not cases:
        parser.error(f"no case of these kernels and chips matches {args.match.pattern!r}")
    if args.record:
        return _record(args.record, cases, args.workers, some=bool(args.kernels or args.match.pattern))
    rows = _rows(cases, args.workers)
    if args.against:
        try:
            grown, shrunk, compared = record.against(args.against, list(rows.values()))
        except (ValueError, LookupError, TypeError):
            return _failed(f"{args.against} is not a record of the ledger")
        summary = f"{len(grown)} grew by more than 3%, {shrunk} shrank by as much"
        print(*grown, f"{compared} of {len(rows)} cases are in the record: {summary}", sep="\n")
        return 1 if grown or len(rows) < len(cases) else 0
    print(report.table(list(rows.values())))
    return 0 if len(rows) == len(cases) else 1


def _rows(cases: Mapping[matrix.Task, CompileCase], workers: int | None) -> dict[matrix.Task, Row]:
    """Counts the cases; prints the errors of those that do not compile."""
    outcomes = matrix.compile_tasks(list(cases), workers, matrix.progress_line())
    rows: dict[matrix.Task, Row] = {}
    for task, case in cases.items():
        if (result := outcomes[task].counted) is not None:
            rows[task] = CHIPS[task.chip], case, result
        else:
            print(f"{task.chip} {case.name} {case.dtype}: {outcomes[task].error}", file=sys.stderr)
    return rows


def _record(file: Path, cases: Mapping[matrix.Task, CompileCase], workers: int | None, *, some: bool) -> int:
    """Counts and records the cases, chip by chip. some: the other compile cases of the chips stay recorded."""
    missing = 0
    for chip in dict.fromkeys(task.chip for task in cases):
        own = {task: case for task, case in cases.items() if task.chip == chip}
        entries = [record.entry_of(*row) for row in _rows(own, workers).values()]
        left = {(case.name, case.dtype) for _, case in matrix.enumerate_cases([CHIPS[chip]])}
        left -= {(case.name, case.dtype) for case in own.values()}
        others = [each for each in record.entries_of(file, chip) if (each["case"], each["dtype"]) in left]
        record.write(file, {chip: [*(others if some else ()), *entries]})
        missing += len(own) - len(entries)
        print(f"{chip}: {len(entries)} cases", flush=True)
    return 1 if missing else 0


def _search(args: argparse.Namespace, named: Sequence[str]) -> int:
    cases = _listed(args, named, args.search)
    if not cases:
        return _failed(f"no case of {args.search} and these chips matches {args.match.pattern!r}")
    chosen: dict[tuple[str, str], tuple[matrix.Task, CompileCase]] = {}
    for task, case in cases.items():
        chosen.setdefault((task.chip, case.name + case.dtype if args.match.pattern else ""), (task, case))
    for task, case in chosen.values():
        tried = search.search(CHIPS[task.chip], case)
        print(report.tried(CHIPS[task.chip], tried))
        print(search.reason(CHIPS[task.chip], tried, case), end="\n\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; finished counts are cached")
