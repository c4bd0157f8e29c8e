"""Test files of other projects that are run, the version that their list of differences was reviewed with, how,
and what became of them."""

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
    """One project's tests of what fasttfm has too."""

    name: str
    """That of its flag and of its record."""
    project: str
    """Where the source is published."""
    version: str
    """The commit or version that the list of differences was reviewed with."""
    digest: str
    """sources() of that version."""
    files: tuple[str, ...]
    """Test files, by their path in the project."""
    beside: tuple[str, ...] = ()
    """What the test files import from beside them."""
    stand_in: str
    """The module of tests.peer_tests.stand_ins that puts fasttfm in the project's place."""
    substitutions: tuple[tuple[str, str], ...] = ()
    """Texts of the test files that are exchanged: devices, and loops that would take hours on a CPU."""
    packages: tuple[str, ...] = ()
    """Modules that the tests import beyond what fasttfm's own tests need."""
    absent: tuple[str, ...] = ()
    """Test functions of what fasttfm has no counterpart to, left out before they are collected."""
    longest: int = 0
    """Cases with a parameter seqlen... above it are left out: too long on a CPU; 0: none."""
    largest: int = 0
    """Cases of more logits, parameters B times T times V, are left out, too; 0: none."""

    def sources(self, folder: Path) -> str:
        """A digest of the test files in a checkout. Raises FileNotFoundError where one is missing."""
        digest = hashlib.sha256()
        for name in sorted(self.files):
            digest.update(name.encode() + b"\0" + folder.joinpath(name).read_bytes())
        return digest.hexdigest()[:16]


def _fixed(value: Any) -> Any:
    """Lists as tuples, which a frozen suite holds."""
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


_TABLE = parse_yaml((Path(__file__).parent / "suites.yaml").read_bytes())
SUITES = tuple(
    Suite(name=name, **{key: _fixed(value) for key, value in fields.items()}) for name, fields in _TABLE.items()
)


# What became of a peer's tests, held against the reviewed list of differences. A line of differences.yaml has tests (a
# pattern as a shell's, of FILE::TEST[PARAMETERS]), error (a regular expression found in the first line of the failure),
# refused (true where fasttfm says that it does not do this), and its reason.

LIST = Path(__file__).parent / "differences.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A line of the list."""

    tests: str
    error: str
    reason: str
    refused: bool = False

    def explains(self, test: str, text: str) -> bool:
        """Return whether a failure is what this line is about."""
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


def judge(results: Iterable[dict[str, Any]], known: list[Difference]) -> Verdict:
    """Sorts the plugin's lines. A failure belongs to the first line that explains it."""
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
