"""The tests that need no GPU: `make test` runs a fixed part of their cases in two runs, `make test-all` every one.

    python -m tests.suite                    the cases of the gate (CONTRIBUTING, "The gate and the whole")
    python -m tests.suite --run executed     one of the runs alone: `make test` has both at once
    python -m tests.suite --all              every case, with a record a run

The first run does not collect what others run: those of a GPU (the device queue), and those of the second. The second
executes kernels' PTX, for which Triton must not be in its interpreter. With --all, a third (tests/processors.py) takes
tests whose numbers the processor decides, as on every one that this can stand for. All runs go to their end; status 1
where a case failed. A run with --all leaves a line in benchmarks/results/suite.jsonl, which replaces the line of this
run and this processor.
"""

import os
import platform
from collections.abc import Sequence

from benchmarks import command
from benchmarks.measure import records
from tests import processors
from tests.pytest_runs import counted

EXECUTED = ("tests/executed", "ptx-check/tests/kernels")
OF_OTHERS = [*(f"--ignore={folder}" for folder in EXECUTED), "--ignore-glob=tests/gpu/test_[!p]*.py"]
RUNS = {"tests": (OF_OTHERS, {}), "executed": (EXECUTED, {"TRITON_INTERPRET": "0"})}
"""Run -> pytest's arguments, and what is set beside the environment."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.suite", __doc__)
    parser.add_argument("--all", action="store_true", help="every case, with a record a run")
    parser.add_argument("--run", choices=RUNS, help="one of the runs (default: one after the other)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    args = parser.parse_args(argv)
    cases = {"FASTTFM_TESTS": "all" if args.all else "gate"}
    status = 0
    for name, (arguments, variables) in RUNS.items():
        if args.run not in (None, name):
            continue
        run = counted(["--durations=20", *arguments], args.workers, {**variables, **cases}, run=name)
        print(f"{name}: {run['passed']:,} of {run['cases']:,} cases pass, {run['seconds']:,.0f} s", flush=True)
        if args.all:
            command.keep(args.results, "suite", key=_key, **run, workers=args.workers)
        status |= bool(run["failed"])
    if args.all and args.run is None and platform.machine() == "x86_64":
        status |= processors.main(["--workers", str(args.workers), "--results", str(args.results)])
    return status


def _key(record: records.Record) -> tuple[str, str]:
    return record["machine"]["processor"], record["run"]


if __name__ == "__main__":
    raise SystemExit(command.run(main))
