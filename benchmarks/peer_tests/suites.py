"""Which test files of which projects are run, the version that their list of differences was reviewed with, and how."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.parsing import parse_yaml


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
    """The module of benchmarks.peer_tests.stand_ins that puts fasttfm in the project's place."""
    substitutions: tuple[tuple[str, str], ...] = ()
    """Texts of the test files that are exchanged: devices, and loops that would take hours on a CPU."""
    packages: tuple[str, ...] = ()
    """Modules that the tests import beyond what fasttfm's own tests need."""
    absent: tuple[str, ...] = ()
    """Test functions of what fasttfm has no counterpart to, left out before they are collected."""
    runs_here: bool = False
    """Whether the project itself runs on a CPU: tests that it fails too, being of another version, are left out."""
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
