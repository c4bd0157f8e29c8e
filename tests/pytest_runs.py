"""Runs of the project's tests in a process of their own, and what pytest reports of each case."""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from fasttfm.system.children import run_to_end


def run_tests(arguments: Sequence[str], workers: int, environment: Mapping[str, str]) -> list[ElementTree.Element]:
    """The cases of `pytest ARGUMENTS`, failing ones too, as JUnit's format has them: elements <testcase>.

    workers: processes. environment: what is set beside this process's. Raises CalledProcessError where pytest itself
    fails.
    """
    spread = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else ["-n", "0"]  # 0: in this one process
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-q", *spread, "-p", "no:cacheprovider", f"--junitxml={report}"]
        words += ["-o", "junit_family=xunit1", *arguments]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        done = run_to_end(words, cwd=machine.ROOT, env=variables)
        if done.returncode not in (0, 1):  # 1: some cases failed
            raise subprocess.CalledProcessError(done.returncode, words)
        return list(ElementTree.parse(report).getroot().iter("testcase"))


def name_of(case: ElementTree.Element) -> str:
    return "::".join(filter(None, (case.get("classname"), case.get("name"))))


def counted(arguments: Sequence[str], workers: int, environment: Mapping[str, str], **what: str) -> dict[str, Any]:
    """The record of `pytest ARGUMENTS`: what was run, counts, and seconds."""
    began = time.perf_counter()
    of_them = counts(run_tests(arguments, workers, environment))
    return {**what, **of_them, "seconds": round(time.perf_counter() - began, 1)}


def counts(
    cases: Sequence[ElementTree.Element], name: Callable[[ElementTree.Element], Any] = name_of
) -> dict[str, Any]:
    """The fields of a record: cases that were not left out, how many passed, and the names of those that did not."""
    run = [case for case in cases if case.find("skipped") is None]
    bad = [case for case in run if case.find("failure") is not None or case.find("error") is not None]
    return {"cases": len(run), "passed": len(run) - len(bad), "failed": [name(case) for case in bad]}
