"""Shares of every kernel's cases that are right when their PTX is executed on a CPU.

    python -m tests.executed                    every chip, as `make executed` does; an hour on a core
    python -m tests.executed --chip sm_90       one of them

Runs tests/executed and ptx-check/tests/kernels whole, chip after chip, and after each of them puts its line into
benchmarks/results/executed.jsonl, so that an interrupted run keeps the chips before. Ends with status 1 where a case
failed; the record names it.
"""

import os
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from benchmarks import command
from benchmarks.measure import machine, records
from tests.pytest_runs import counts, run_tests

TESTS = (machine.ROOT / "tests" / "executed", machine.ROOT / "ptx-check" / "tests" / "kernels")
CHIPS = ("sm_60", "sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
VARIABLES = {"TRITON_INTERPRET": "0", "FASTTFM_TEST_DAY": "every"}
NO_CHIP = "none named"
"""Of cases whose name has no chip: examples, published faults of the compiler."""


def expression(chip: str) -> str:
    """Return the words for pytest's -k that select a chip's cases."""
    return f"not ({' or '.join(CHIPS)})" if chip == NO_CHIP else chip


def execute(chip: str, workers: int) -> dict[str, Any]:
    """Run a chip's cases: how many, those that passed, and names of the others."""
    chosen = ["-m", "executed or not executed", "-k", expression(chip)]
    return counts(run_tests([*chosen, *map(str, TESTS)], workers, VARIABLES), lambda case: case.get("name"))


by_chip = itemgetter("chip")
"""A new record takes the place of its chip's."""


def sentence(lines: Sequence[records.Record]) -> str:
    """Return what the records say together, as docs/ptx.md and docs/proof.md quote it."""
    cases, passed = (sum(record[name] for record in lines) for name in ("cases", "passed"))
    return f"{passed:,} of {cases:,} cases pass"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.executed", __doc__)
    names = (*CHIPS, NO_CHIP)
    parser.add_argument("--chip", action="append", choices=names, help="one, or several in turn (default: all)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    args = parser.parse_args(argv)
    written = []
    for chip in args.chip or names:
        began = time.perf_counter()
        found = execute(chip, args.workers)
        seconds = round(time.perf_counter() - began, 1)
        told = {"chip": chip, **found, "seconds": seconds, "workers": args.workers}
        record = command.keep(args.results, "executed", key=by_chip, **told)
        written.append(record)
        print(f"{chip}: {sentence([record])}, {seconds:,.0f} s", flush=True)
    print(sentence(written))
    return 1 if any(record["failed"] for record in written) else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
