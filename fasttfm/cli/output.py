"""Messages of a command, one way for all: notes while it works, a bar on a terminal, its result in the end.

    --quiet    no notes and no progress; the result, warnings and errors stay
    --json     the result as one JSON document on standard output; notes go to standard error

On a terminal progress is a bar with the time left, anywhere else there are plain lines.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def add_output_flags(parser: argparse.ArgumentParser, result: str = "", *, lines: str = "") -> None:
    """Adds --quiet and --json; result: what the JSON document holds, or lines: what each does where there is one a line
    of the input."""
    document = f"print {result} as one JSON document on standard output"
    if lines:
        document = f"print one JSON document a line in place of text: the line's number from 0, {lines}"
    group = parser.add_argument_group("what is printed")
    group.add_argument("--quiet", action="store_true", help="print only the result, warnings and errors")
    group.add_argument("--json", action="store_true", help=document)


class Output:
    """Destination of a command's messages, by its --quiet and --json."""

    def __init__(self, command: str, *, quiet: bool = False, as_json: bool = False) -> None:
        """command: as users type it, such as `prepare`."""
        self.command, self.quiet, self.as_json = command, quiet, as_json
        self.notes: list[str] = []
        """Notes so far, quiet ones included."""

    @classmethod
    def of(cls, args: argparse.Namespace, command: str) -> "Output":
        """The output that the command line asks for."""
        return cls(command, quiet=args.quiet, as_json=args.json)

    def note(self, line: str) -> None:
        """Print a line on the progress of the work; --quiet hides it, except warnings."""
        self.notes.append(line)
        if not self.quiet or line.startswith("warning"):
            stream = sys.stderr if self.as_json or (self.quiet and line.startswith("warning")) else sys.stdout
            print(f"fasttfm {self.command}: {line}", file=stream, flush=True)

    def result(self, line: str, *, told: Sequence[str] | None = None, **fields: Any) -> None:
        """Write the result: the line, or with --json the fields. told: what was left out or assumed, where anything may
        be; a line each, or the field `notes`."""
        if told is not None:
            fields["notes"] = list(told)
        notes = [] if self.quiet else [f"note: {each}" for each in told or ()]
        shown = json.dumps({"command": self.command, **fields}) if self.as_json else "\n".join([line, *notes])
        print(shown, flush=True)

    @contextmanager
    def bar(self, **options: Any) -> Iterator[Any]:
        """tqdm's bar on standard error, where that is a terminal that somebody looks at; silent elsewhere."""
        from tqdm import tqdm

        with tqdm(file=sys.stderr, dynamic_ncols=True, disable=self.quiet or not sys.stderr.isatty(), **options) as bar:
            yield bar

    def progress(self, name: str, unit: str) -> Callable[[int, int | None], None]:
        """A function that is told what is done and what there is in all, None where that is not known.

        A bar with the time left on a terminal, elsewhere a line for each tenth. unit: in the plural; bytes are scaled.
        """
        if self.quiet:
            return lambda done, total: None
        if not sys.stderr.isatty():
            return self._tenths(name, unit)
        from tqdm import tqdm

        scale = {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if unit == "bytes" else {"unit": f" {unit}"}
        bar = tqdm(desc=name, file=sys.stderr, dynamic_ncols=True, **scale)

        def move(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        return move

    def _tenths(self, name: str, unit: str) -> Callable[[int, int | None], None]:
        began, first, tenths = time.monotonic(), None, 0

        def tell(done: int, total: int | None) -> None:
            nonlocal first, tenths
            first = done if first is None else first
            if done == total and not tenths:  # quickly done: not worth a line
                return
            if total and done * 10 // total > tenths:
                tenths = done * 10 // total
                left = (time.monotonic() - began) * (total - done) / max(done - first, 1)
                rest = f", about {left:,.0f} s left" if done > first and done < total else ""
                self.note(f"{name}: {done:,} of {total:,} {unit}{rest}")

        return tell
