"""The tests that need no GPU: `make test` runs a fixed part of their cases in two runs, `make test-all` every one.

    python -m tests.suite                    the cases of the gate (CONTRIBUTING, "The gate and the whole")
    python -m tests.suite --run executed     one of the runs alone: `make test` has both at once
    python -m tests.suite --all              every case, with a record

The first run does not collect what others run: those of a GPU (the device queue), and those of the second. The second
executes kernels' PTX, for which Triton must not be in its interpreter. With --all, a third (tests/processors.py) takes
tests whose numbers the processor decides, as on every one that this can stand for. All runs go to their end; status 1
where a case failed. The line in benchmarks/results/suite.jsonl takes the place of the one of this machine's processor.
"""

import os
import platform
import time
from collections.abc import Sequence

from benchmarks import command
from tests import processors
from tests.pytest_runs import counted

EXECUTED = ("tests/executed", "ptx-check/tests/kernels")
OF_OTHERS = [*(f"--ignore={folder}" for folder in EXECUTED), "--ignore-glob=tests/gpu/test_[!p]*.py"]
RUNS = {"tests": (OF_OTHERS, {}), "executed": (EXECUTED, {"TRITON_INTERPRET": "0"})}
"""Run -> pytest's arguments, and what is set beside the environment."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.suite", __doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every case, with a record")
    which.add_argument("--run", choices=RUNS, help="one of the runs (default: one after the other)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    cases = {"FASTTFM_TESTS": "all" if args.all else "gate"}
    runs = [
        counted(["--durations=20", *arguments], args.workers, {**variables, **cases}, run=name)
        for name, (arguments, variables) in RUNS.items()
        if args.run in (None, name)
    ]
    status = 0
    if args.all and platform.machine() == "x86_64":
        status = processors.main(["--workers", str(args.workers), "--results", str(args.results)])
    for each in runs:
        print(f"{each['run']}: {each['passed']:,} of {each['cases']:,} cases pass, {each['seconds']:,.0f} s")
    if args.all:
        fields = {"runs": runs, "workers": args.workers, "seconds": round(time.perf_counter() - began, 1)}
        command.keep(args.results, "suite", key=lambda record: record["machine"]["processor"], **fields)
    return 1 if status or any(each["failed"] for each in runs) else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
