"""How many cases of every kernel are right when their PTX is executed on a CPU, and how many mutations are noticed.

    python -m benchmarks.executed                   every chip, as `make executed` does; half an hour on a core
    python -m benchmarks.executed --chip sm_90      one of them

Runs tests/executed whole, chip after chip, and after each of them puts its line into benchmarks/results/executed.jsonl,
so that an interrupted run keeps the chips before. Ends with status 1 where a case failed; the record names it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.measure import machine, records

TESTS = machine.ROOT / "tests" / "executed"
CHIPS = ("sm_60", "sm_75", "sm_80", "sm_90", "sm_120")
NO_CHIP = "none named"
"""Of cases whose name has no chip: examples, published faults of the compiler."""


def expression(chip: str) -> str:
    """What pytest's -k takes to select a chip's cases."""
    return f"not ({' or '.join(CHIPS)})" if chip == NO_CHIP else chip


def execute(chip: str, workers: int, report: Path) -> None:
    """Runs a chip's cases, failing ones too. Raises CalledProcessError where pytest itself fails."""
    spread = str(workers) if workers > 1 else "0"  # 0: in this one process
    words = [sys.executable, "-m", "pytest", "-q", "-n", spread, "-p", "no:cacheprovider", f"--junitxml={report}"]
    words += ["-o", "junit_family=xunit1", "-m", "executed or not executed", "-k", expression(chip), str(TESTS)]
    done = subprocess.run(
        words, cwd=machine.ROOT, env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}, check=False
    )
    if done.returncode not in (0, 1):  # 1: some cases failed
        raise subprocess.CalledProcessError(done.returncode, words)


def counted(report: Path) -> dict[str, Any]:
    """Of pytest's report in JUnit's format: cases, those that passed, names of the others, and mutations by subject."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    properties = [entry for case in cases for entry in case.iter("property") if entry.get("name") == "mutations"]
    return {
        "cases": len(cases) - len(skipped),
        "passed": len(cases) - len(skipped) - len(bad),
        "failed": [case.get("name") for case in bad],
        "mutations": [json.loads(entry.get("value", "")) for entry in properties],
    }


def sentence(lines: Sequence[records.Record]) -> str:
    """What the records say together, as docs/ptx.md and README quote it."""
    cases, passed = (sum(record[name] for record in lines) for name in ("cases", "passed"))
    subjects = [subject for record in lines for subject in record["mutations"]]
    noticed, missed = (sum(subject[name] for subject in subjects) for name in ("noticed", "missed"))
    text = f"{passed:,} of {cases:,} cases pass"
    if subjects:
        text += f", and {noticed:,} of {noticed + missed:,} mutations that make a difference are noticed"
    return text


def write(path: Path, record: records.Record) -> None:
    """Puts the record in the place of the one of its chip; the others stay."""
    records.validate(record)
    kept = {other["chip"]: other for other in records.read(path)} if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(each) + "\n" for each in {**kept, record["chip"]: record}.values())
    path.write_text("".join(lines), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("executed", __doc__)
    names = (*CHIPS, NO_CHIP)
    parser.add_argument("--chip", action="append", choices=names, help="one, or several in turn (default: all)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    args = parser.parse_args(argv)
    written = []
    for chip in args.chip or names:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            execute(chip, args.workers, report)
            counts = counted(report)
        seconds = round(time.perf_counter() - began, 1)
        record = {"benchmark": "executed", "chip": chip, **counts, "seconds": seconds, "workers": args.workers}
        write(args.results / "executed.jsonl", {**record, "machine": machine.describe()})
        written.append(record)
        print(f"{chip}: {sentence([record])}, {seconds:,.0f} s", flush=True)
    print(sentence(written))
    return 1 if any(record["failed"] for record in written) else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
