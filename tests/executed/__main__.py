"""Executes the PTX of every kernel on a CPU, and records passing cases and noticed mutations.

    python -m tests.executed                    every chip, as `make executed` does
    python -m tests.executed --chip sm_90       one of them

Runs all of tests/executed and ptx-check/tests/kernels chip by chip, in an hour or more on one core, and records a line
in benchmarks/results/executed.jsonl after each. Exit status 1 if a case failed; the record names it.
"""

import os
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from benchmarks import command
from benchmarks.measure import machine, records
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


def execute(chip: str, workers: int) -> dict[str, Any]:
    """Runs the cases of a chip. Returns their number, how many passed, names of the others, mutations by subject."""
    cases = run_tests(["-m", "executed or not executed", "-k", expression(chip), *map(str, TESTS)], workers, VARIABLES)
    properties = [entry for case in cases for entry in case.iter("property") if entry.get("name") == "mutations"]
    mutations = [parse_json(entry.get("value", "")) for entry in properties]
    return {**counts(cases, lambda case: case.get("name")), "mutations": mutations}


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
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    args = parser.parse_args(argv)
    written = []
    for chip in args.chip or names:
        began = time.perf_counter()
        found = execute(chip, args.workers)
        seconds = round(time.perf_counter() - began, 1)
        told = {"chip": chip, **found, "seconds": seconds, "workers": args.workers}
        written.append(command.keep(args.results, "executed", key=by_chip, **told))
        print(f"{chip}: {sentence(written[-1:])}, {seconds:,.0f} s", flush=True)
    print(sentence(written))
    return 1 if any(record["failed"] for record in written) else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
