"""Executes the PTX of every kernel on a CPU, and records passing cases and noticed mutations.

    python -m tests.executed                    every chip, as `make executed` does
    python -m tests.executed --chip sm_90       one of them
    python -m tests.executed --all              also cases that have not changed; an hour on one core

Runs all of tests/executed and ptx-check/tests/kernels chip by chip, and records a line in
benchmarks/results/executed.jsonl after each. Cases that passed before and have not changed are skipped (unchanged.py);
the record names the commit at which they passed. An interrupted run can be resumed. Exit status 1 if a case failed; the
record names it.
"""

import json
import os
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.measure import machine, records
from fasttfm.kernels import choice_cache
from fasttfm.system.parsing import parse_json
from tests.pytest_runs import counts, run_tests

TESTS = (machine.ROOT / "tests" / "executed", machine.ROOT / "ptx-check" / "tests" / "kernels")
CHIPS = ("sm_60", "sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
VARIABLES = {"TRITON_INTERPRET": "0", "FASTTFM_TESTS": "all"}
NO_CHIP = "none named"
"""Stands for cases without a chip in their name: examples, published faults of the compiler."""


def expression(chip: str) -> str:
    """The expression of pytest -k that selects the cases of a chip."""
    return f"not ({' or '.join(CHIPS)})" if chip == NO_CHIP else chip


def kept_file(chip: str) -> Path:
    """The file of passed cases in the user's cache folder, from which an interrupted run is resumed."""
    return choice_cache.folder() / "executed" / f"{chip.replace(' ', '-')}.jsonl"


def execute(chip: str, workers: int, before: records.Record | None = None) -> dict[str, Any]:
    """Runs the cases of a chip. Returns their number, how many passed, names of the others, mutations by subject, and
    the keys of passed cases by the commit at which they were executed. before: the record of an earlier run."""
    commits = {key: commit for commit, keys in (before or {}).get("keys", {}).items() for key in keys}
    known: dict[str, list] = {key: [] for key in commits}
    for subject in (before or {}).get("mutations", []):
        if subject.get("key") in known:
            known[subject["key"]].append(("mutations", json.dumps(subject)))
    file, now = kept_file(chip), machine.git("rev-parse", "HEAD") or "unknown"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(entry) + "\n" for entry in known.items())
    chosen = ["-p", "tests.executed.unchanged", "-m", "executed or not executed", "-k", expression(chip)]
    cases = run_tests([*chosen, *map(str, TESTS)], workers, {**VARIABLES, "EXECUTED_BEFORE": str(file)})
    file.unlink()
    mutations, kept = [], 0
    keys: dict[str, list[str]] = {}
    for case in cases:
        told = {entry.get("name"): entry.get("value", "") for entry in case.iter("property")}
        kept += "kept" in told
        if "key" in told:
            keys.setdefault(commits.get(told["kept"], now) if "kept" in told else now, []).append(told["key"])
        if "mutations" in told:
            subject = parse_json(told["mutations"])
            mutations.append(subject | ({"key": told["key"]} if "key" in told else {}))
    return {**counts(cases, lambda case: case.get("name")), "mutations": mutations, "kept": kept, "keys": keys}


by_chip = itemgetter("chip")
"""A new record replaces that of its chip."""


def sentence(lines: Sequence[records.Record]) -> str:
    """The summary of the records that docs/ptx.md and docs/proof.md quote."""
    cases, passed = (sum(record[name] for record in lines) for name in ("cases", "passed"))
    subjects = [subject for record in lines for subject in record["mutations"]]
    noticed, missed = (sum(subject[name] for subject in subjects) for name in ("noticed", "missed"))
    text = f"{passed:,} of {cases:,} cases pass"
    if subjects:
        text += f", and {noticed:,} of {noticed + missed:,} mutations that make a difference are noticed"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.executed", __doc__)
    names = (*CHIPS, NO_CHIP)
    parser.add_argument("--chip", action="append", choices=names, help="one, or several in turn (default: all)")
    parser.add_argument("--all", action="store_true", help="also execute cases that have not changed")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    args = parser.parse_args(argv)
    file, written = args.results / "executed.jsonl", []
    before = {by_chip(record): record for record in records.read(file)} if file.exists() and not args.all else {}
    for chip in args.chip or names:
        if args.all:
            kept_file(chip).unlink(missing_ok=True)
        began = time.perf_counter()
        found = execute(chip, args.workers, before.get(chip))
        seconds = round(time.perf_counter() - began, 1)
        told = {"chip": chip, **found, "seconds": seconds, "workers": args.workers}
        record = command.keep(args.results, "executed", key=by_chip, **told)
        written.append(record)
        print(f"{chip}: {sentence([record])}, {record['kept']:,} of them before, {seconds:,.0f} s", flush=True)
    print(sentence(written))
    return 1 if any(record["failed"] for record in written) else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
