"""Runs PyTorch's, flash-attention's and Liger's own tests against fasttfm on a CPU.

    python -m tests.peer_tests --flash-attention DIR --liger DIR

DIR is a checkout of the project; projects without one are skipped with a message. fasttfm replaces the project
(stand_ins/), devices in the tests become the CPU, and a fixed sample of the cases is drawn. PyTorch's inputs are
those of the installed torch (pytorch.py). Every failure, including import errors of test files, must be explained by
differences.yaml, and every line of it must explain a failure; otherwise the status is 1. Results replace the suite's
line in benchmarks/results/peer-tests.jsonl.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.measure import machine
from fasttfm.errors import UserError
from fasttfm.system.machine import version
from fasttfm.system.parsing import parse_json
from tests.peer_tests.suites import SUITES, Suite, Verdict, differences, judge

SAMPLE = {"sample": 8, "seed": 0}
"""Cases of one test function, and the seed that draws them: the list of differences was reviewed for these."""


def why_not(suite: Suite, folder: Path | None) -> str:
    """Return why a suite cannot run; '' if it can. Raises UserError for a directory that is not the project's."""
    if folder is None:
        return f"--{suite.name} DIR not given: a checkout of {suite.project} at {suite.version}"
    missing = [name for name in (*suite.files, *suite.beside) if not folder.joinpath(name).is_file()]
    if missing:
        raise UserError(f"--{suite.name} {folder} has no {missing[0]}: give a checkout of {suite.project}")
    absent = [name for name in suite.packages if importlib.util.find_spec(name) is None]
    return f"its tests need {', '.join(absent)}: pip install {' '.join(absent)}" if absent else ""


def copied(suite: Suite, folder: Path, to: Path) -> list[str]:
    """Copy the test files with their substitutions; returns their names."""
    for name in (*suite.beside, *suite.files):
        text = folder.joinpath(name).read_text(encoding="utf-8")
        for old, new in suite.substitutions if name in suite.files else ():
            text = text.replace(old, new)
        to.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        to.joinpath(name).write_text(text, encoding="utf-8")
    return list(suite.files)


def results(suite: Suite, folder: Path) -> list[dict[str, Any]]:
    """Run a suite's tests in a new process. Raises UserError if pytest itself fails."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.jsonl"
        given = {"suite": suite.name, "folder": str(folder.resolve()), **SAMPLE}
        files = copied(suite, folder, Path(place))
        words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.peer_tests.plugin", "-p", "no:cacheprovider"]
        words += ["-p", "no:benchmark", "-c", os.devnull, "--rootdir", place, "--tb=line", "-W", "ignore"]
        words += ["--continue-on-collection-errors", *files]
        environment = {**_environment(), "FASTTFM_PEER_TESTS": json.dumps({**given, "report": str(report)})}
        done = subprocess.run(words, cwd=place, env=environment, check=False, stdout=sys.stderr)
        if done.returncode not in (0, 1):  # 1: some tests failed
            raise UserError(f"--{suite.name} {folder}: pytest ended with {done.returncode}; its words are above")
        return [parse_json(line) for line in report.read_text(encoding="utf-8").splitlines()]


def of_pytorch(*words: str) -> list[dict[str, Any]]:
    """Run tests.peer_tests.pytorch with these arguments and return its results."""
    line = [sys.executable, "-m", "tests.peer_tests.pytorch", *words]
    done = subprocess.run(line, env=_environment(), check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"pytorch: its inputs ended with {done.returncode}; its words are above")
    return [parse_json(each) for each in done.stdout.splitlines()]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(machine.ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def shown(name: str, verdict: Verdict) -> str:
    """Format a suite's counts and reasons."""
    refused, differing, not_run = (sum(c.values()) for c in (verdict.refused, verdict.differing, verdict.not_run))
    lines = [f"{name}: {verdict.passed:,} passed, {refused:,} refused, {differing:,} differ, {not_run:,} not run"]
    for title, counts in (("refused", verdict.refused), ("differ", verdict.differing), ("not run", verdict.not_run)):
        lines += [f"  {title} {count:,}: {reason}" for reason, count in counts.most_common()]
    lines += [f"  NOT EXPLAINED {each}" for each in verdict.unexplained]
    lines += [f"  PASSES MEANWHILE, take it off the list: {each}" for each in verdict.stale]
    return "\n".join(lines)


def record_of(name: str, verdict: Verdict, began: float, **fields: Any) -> dict[str, Any]:
    """Return the record of a suite."""
    return {
        "suite": name,
        **fields,
        **SAMPLE,
        "counts": {
            "passed": verdict.passed,
            "refused": dict(verdict.refused),
            "differing": dict(verdict.differing),
            "not run": dict(verdict.not_run),
        },
        "unexplained": verdict.unexplained,
        "seconds": round(time.perf_counter() - began, 1),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy", "pytest")},
    }


def of_suite(suite: Suite, folder: Path) -> tuple[Verdict, dict[str, Any]]:
    """Run one suite; returns its verdict and record."""
    digest = suite.sources(folder)
    if digest != suite.digest:
        print(f"{suite.name}: these tests are not those of {suite.version}, with which the list was reviewed")
    began = time.perf_counter()
    verdict = judge(results(suite, folder), differences(suite.name))
    reviewed = suite.version if digest == suite.digest else None
    return verdict, record_of(suite.name, verdict, began, version=reviewed, digest=digest)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.peer_tests", __doc__)
    for suite in SUITES:
        parser.add_argument(f"--{suite.name}", type=Path, metavar="DIR", help=f"a checkout of {suite.project}")
    args = parser.parse_args(argv)
    good = True

    def settled(verdict: Verdict, record: dict[str, Any]) -> None:
        nonlocal good
        command.keep(args.results, "peer_tests", key=itemgetter("suite"), **record)
        print(shown(record["suite"], verdict), flush=True)
        good &= verdict.good

    began = time.perf_counter()
    verdict = judge(of_pytorch("torch"), differences("pytorch"))
    settled(verdict, record_of("pytorch", verdict, began, version=version("torch"), digest=version("torch")))
    for suite in SUITES:
        folder = getattr(args, suite.name.replace("-", "_"))
        if reason := why_not(suite, folder):
            print(f"{suite.name}: not run: {reason}", flush=True)
        else:
            settled(*of_suite(suite, folder))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(command.run(main))
