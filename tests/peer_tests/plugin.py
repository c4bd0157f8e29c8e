"""pytest plugin for a peer's tests: replaces the peer by fasttfm, samples the cases, and reports each.

Loaded with -p in a new process and configured by FASTTFM_PEER_TESTS, a JSON object: suite, folder, sample, seed and
report. Writes a JSON line to report for each case, and for a file that cannot be imported: test; outcome (passed,
failed or skipped); text (first line of the error, or the reason); cases (1, or the number left out together).
"""

import importlib
import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fasttfm.system.parsing import parse_json
from tests.peer_tests.suites import SUITES

GIVEN = parse_json(os.environ["FASTTFM_PEER_TESTS"])
SUITE = next(suite for suite in SUITES if suite.name == GIVEN["suite"])
importlib.import_module(f"tests.peer_tests.stand_ins.{SUITE.stand_in}").install(Path(GIVEN["folder"]))
REPORT = Path(GIVEN["report"]).open("a", encoding="utf-8")  # noqa: SIM115 - as long as the process


def say(test: str, outcome: str, text: str = "", cases: int = 1) -> None:
    print(json.dumps({"test": test, "outcome": outcome, "text": text, "cases": cases}), file=REPORT, flush=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> Iterator[None]:
    """Drop tests without a counterpart, and cases that are too long or not in the sample."""
    outcome: Any = yield
    items = outcome.get_result()
    if name in SUITE.absent:
        outcome.force_result([])
        say(f"{Path(collector.nodeid.split('::')[0]).name}::{name}", "skipped", "no counterpart in fasttfm")
        return
    if not isinstance(items, list) or not items or not hasattr(items[0], "callspec"):
        return
    short = [item for item in items if not _too_long(item)]
    chosen = short
    if len(short) > GIVEN["sample"]:
        chosen = random.Random(f"{GIVEN['seed']} {name}").sample(short, GIVEN["sample"])
    for count, why in ((len(items) - len(short), "too long on a CPU"), (len(short) - len(chosen), "not of the sample")):
        if count:
            say(_name(items[0]).split("[")[0], "skipped", why, count)
    outcome.force_result(chosen)


def _too_long(item: Any) -> bool:
    lengths = [v for n, v in item.callspec.params.items() if n.startswith("seqlen") and type(v) is int]
    logits = math.prod(v for n, v in item.callspec.params.items() if n in ("B", "T", "V"))
    too_many = bool(SUITE.largest) and logits > SUITE.largest
    return too_many or (bool(SUITE.longest) and max(lengths, default=0) > SUITE.longest)


def _name(item: Any) -> str:
    file, _, rest = item.nodeid.partition("::")
    return f"{Path(file).name}::{rest}"


def pytest_exception_interact(node: Any, call: Any, report: Any) -> None:
    """Report a file that cannot be imported."""
    if isinstance(report, pytest.CollectReport):
        lines = [line.removeprefix("E").strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        say(Path(node.nodeid).name, "failed", lines[-1] if lines else str(call.excinfo.value).splitlines()[0])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Report a case after its call, or if it could not be called."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" or not report.passed:
        error = call.excinfo.value if call.excinfo is not None else None
        line = next(iter(str(error or "").strip().splitlines()), "")[:300]
        text = line if report.skipped else f"{type(error).__name__}: {line}"
        if report.when == "call" or report.skipped or report.failed:
            say(_name(item), report.outcome, "" if report.passed else text)
