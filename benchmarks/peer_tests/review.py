"""What became of a peer's tests, held against the reviewed list of differences (differences.yaml).

A line of the list has tests (a pattern as a shell's, of FILE::TEST[PARAMETERS]), error (a regular expression found in
the first line of the failure), refused (true where fasttfm says that it does not do this), and its reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fasttfm.parsing import parse_yaml

LIST = Path(__file__).parent / "differences.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A line of the list."""

    tests: str
    error: str
    reason: str
    refused: bool = False

    def explains(self, test: str, text: str) -> bool:
        """Whether a failure is what this line is about."""
        return fnmatchcase(test, self.tests.replace("[", "[[]")) and re.search(self.error, text) is not None


@dataclass(slots=True)
class Verdict:
    """Counts of one suite, by reason, and what no line of the list explains."""

    passed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    not_run: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    """Lines of the list that explained nothing although their tests ran: what they are about passes meanwhile."""

    @property
    def good(self) -> bool:
        return not self.unexplained and not self.stale


def differences(suite: str, path: Path = LIST) -> list[Difference]:
    """The reviewed lines of a suite. Raises TypeError for a line with another field, KeyError for an unknown suite."""
    lines: dict[str, list[dict[str, Any]]] = parse_yaml(path.read_bytes())
    return [Difference(**line) for line in lines[suite]]


def judge(
    results: Iterable[dict[str, Any]], known: list[Difference], theirs: frozenset[str] | set[str] = frozenset()
) -> Verdict:
    """Sorts the plugin's lines. A failure belongs to the first line that explains it; theirs fail without fasttfm."""
    verdict, used, ran = Verdict(), set[int](), list[str]()
    for result in results:
        test, outcome, text = result["test"], result["outcome"], result["text"]
        if outcome == "skipped":
            verdict.not_run[text] += result["cases"]
            continue
        if outcome == "failed" and test in theirs:
            verdict.not_run["fails with the project itself too"] += 1
            continue
        ran.append(test)
        if outcome == "passed":
            verdict.passed += 1
            continue
        line = next((i for i, each in enumerate(known) if each.explains(test, text)), None)
        if line is None:
            verdict.unexplained.append(f"{test}: {text}")
            continue
        used.add(line)
        (verdict.refused if known[line].refused else verdict.differing)[known[line].reason] += 1
    for i, each in enumerate(known):
        if i not in used and any(fnmatchcase(test, each.tests.replace("[", "[[]")) for test in ran):
            verdict.stale.append(f"{each.tests}: {each.error}")
    return verdict
