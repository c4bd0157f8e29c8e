"""What a command says, one way for all: notes while it works, a bar on a terminal, its result in the end.

    --quiet    no notes and no progress; the result, warnings and errors stay
    --json     the result as one JSON document on standard output; notes go to standard error

On a terminal progress is a bar with the time left, anywhere else there are plain lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")


def add_output_flags(parser: argparse.ArgumentParser, result: str = "the result") -> None:
    """Adds --quiet and --json; result: what the JSON document holds."""
    group = parser.add_argument_group("what is printed")
    group.add_argument("--quiet", action="store_true", help="no notes and no progress; warnings and errors stay")
    group.add_argument("--json", action="store_true", help=f"print {result} as one JSON document on standard output")


class Output:
    """Where a command's words go, by its --quiet and --json."""

    def __init__(self, command: str, *, quiet: bool = False, as_json: bool = False) -> None:
        """command: as users type it, such as `prepare`."""
        self.command, self.quiet, self.as_json = command, quiet, as_json
        self.notes: list[str] = []
        """What was told, also where nobody was to see it."""

    @classmethod
    def of(cls, args: argparse.Namespace, command: str) -> Output:
        """As the command line says."""
        return cls(command, quiet=args.quiet, as_json=args.json)

    def note(self, line: str) -> None:
        """A line on what is done; warnings are told by --quiet too."""
        self.notes.append(line)
        if not self.quiet or line.startswith("warning"):
            stream = sys.stderr if self.as_json or (self.quiet and line.startswith("warning")) else sys.stdout
            print(f"fasttfm {self.command}: {line}", file=stream, flush=True)

    def result(self, line: str, **fields: Any) -> None:
        """What came out: the line, or with --json the fields."""
        print(json.dumps({"command": self.command, **fields}) if self.as_json else line, flush=True)

    @contextmanager
    def bar(self, **options: Any) -> Iterator[Any]:
        """tqdm's bar on standard error, where that is a terminal that somebody looks at; silent elsewhere."""
        from tqdm import tqdm

        with tqdm(file=sys.stderr, dynamic_ncols=True, disable=self.quiet or not sys.stderr.isatty(), **options) as bar:
            yield bar

    def over(self, items: Iterable[Item], **options: Any) -> Iterator[Item]:
        """The items, with a bar that counts them."""
        with self.bar(**options) as bar:
            for item in items:
                yield item
                bar.update()
