"""Test suites of other projects, and the comparison of their results with the reviewed differences."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fasttfm.system.parsing import parse_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A project's tests of features that fasttfm has too."""

    name: str
    """Name of its flag and record."""
    project: str
    """Address of the source."""
    version: str
    """Commit or version for which the list of differences was reviewed."""
    digest: str
    """sources() of that version."""
    files: tuple[str, ...]
    """Test files, by path in the project."""
    beside: tuple[str, ...] = ()
    """Files that the test files import."""
    stand_in: str
    """Module of tests.peer_tests.stand_ins that replaces the project by fasttfm."""
    substitutions: tuple[tuple[str, str], ...] = ()
    """Replacements in the test files: devices, and loops that would take hours on a CPU."""
    packages: tuple[str, ...] = ()
    """Required packages beyond those of fasttfm's own tests."""
    absent: tuple[str, ...] = ()
    """Test functions without a counterpart in fasttfm; not collected."""
    longest: int = 0
    """Maximum of parameters named seqlen...; longer cases are left out. 0: no limit."""
    largest: int = 0
    """Maximum number of logits, B * T * V; larger cases are left out. 0: no limit."""

    def sources(self, folder: Path) -> str:
        """Return a digest of the test files in a checkout. Raises FileNotFoundError if one is missing."""
        digest = hashlib.sha256()
        for name in sorted(self.files):
            digest.update(name.encode() + b"\0" + folder.joinpath(name).read_bytes())
        return digest.hexdigest()[:16]


def _fixed(value: Any) -> Any:
    """Convert lists to tuples recursively."""
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


_TABLE = parse_yaml((Path(__file__).parent / "suites.yaml").read_bytes())
SUITES = tuple(
    Suite(name=name, **{key: _fixed(value) for key, value in fields.items()}) for name, fields in _TABLE.items()
)


LIST = Path(__file__).parent / "differences.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A reviewed difference, a line of differences.yaml.

    tests: a shell pattern of FILE::TEST[PARAMETERS]; error: a regular expression for the first line of the failure;
    refused: whether fasttfm refuses the feature.
    """

    tests: str
    error: str
    reason: str
    refused: bool = False

    def explains(self, test: str, text: str) -> bool:
        """Return whether this difference explains a failure."""
        return fnmatchcase(test, self.tests.replace("[", "[[]")) and re.search(self.error, text) is not None


@dataclass(slots=True)
class Verdict:
    """Counts of one suite by reason, and unexplained failures."""

    passed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    not_run: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    """Differences whose tests ran but that explain no failure: the tests pass now."""

    @property
    def good(self) -> bool:
        return not self.unexplained and not self.stale


def differences(suite: str, path: Path = LIST) -> list[Difference]:
    """Read the differences of a suite. Raises TypeError for an unknown field, KeyError for an unknown suite."""
    lines: dict[str, list[dict[str, Any]]] = parse_yaml(path.read_bytes())
    return [Difference(**line) for line in lines[suite]]


def judge(results: Iterable[dict[str, Any]], known: list[Difference]) -> Verdict:
    """Count the plugin's results; a failure belongs to the first difference that explains it."""
    verdict, used, ran = Verdict(), set[int](), list[str]()
    for result in results:
        test, outcome, text = result["test"], result["outcome"], result["text"]
        if outcome == "skipped":
            verdict.not_run[text] += result["cases"]
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
