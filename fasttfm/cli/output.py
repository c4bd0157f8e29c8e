"""Output of a command: notes and a progress bar while it runs, and its result.

    --quiet    no notes and no progress; the result, warnings and errors stay
    --json     the result as one JSON document on standard output; notes go to standard error

Progress is a bar with the remaining time on a terminal, plain lines elsewhere.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def add_output_flags(parser: argparse.ArgumentParser, result: str = "", *, lines: str = "") -> None:
    """Add --quiet and --json. result: content of the JSON document; lines: content if there is one per input line."""
    document = f"print {result} as one JSON document on standard output"
    if lines:
        document = f"print one JSON document per line instead of text: the line's number from 0, {lines}"
    group = parser.add_argument_group("what is printed")
    group.add_argument("--quiet", action="store_true", help="print only the result, warnings and errors")
    group.add_argument("--json", action="store_true", help=document)


class Output:
    """Writes a command's messages according to --quiet and --json."""

    def __init__(self, command: str, *, quiet: bool = False, as_json: bool = False) -> None:
        """command: as typed, such as `prepare`."""
        self.command, self.quiet, self.as_json = command, quiet, as_json
        self.notes: list[str] = []
        """All notes so far, hidden ones included."""

    @classmethod
    def of(cls, args: argparse.Namespace, command: str) -> "Output":
        return cls(command, quiet=args.quiet, as_json=args.json)

    def note(self, line: str) -> None:
        """Print a progress note; --quiet hides it unless it is a warning."""
        self.notes.append(line)
        if not self.quiet or line.startswith("warning"):
            stream = sys.stderr if self.as_json or self.quiet else sys.stdout
            print(f"fasttfm {self.command}: {line}", file=stream, flush=True)

    def result(self, line: str, *, told: Sequence[str] | None = None, **fields: Any) -> None:
        """Print the result: the line, or the fields with --json. told: omissions and assumptions, printed as notes."""
        if told is not None:
            fields["notes"] = list(told)
        notes = [] if self.quiet else [f"note: {each}" for each in told or ()]
        shown = json.dumps({"command": self.command, **fields}) if self.as_json else "\n".join([line, *notes])
        print(shown, flush=True)

    @contextmanager
    def bar(self, **options: Any) -> Iterator[Any]:
        """A tqdm bar on standard error; disabled with --quiet and if stderr is not a terminal."""
        from tqdm import tqdm

        with tqdm(file=sys.stderr, dynamic_ncols=True, disable=self.quiet or not sys.stderr.isatty(), **options) as bar:
            yield bar

    def progress(self, name: str, unit: str) -> Callable[[int, int | None], None]:
        """Return a callback (done, total or None if unknown) that shows progress.

        A bar on a terminal, a line for every tenth elsewhere. unit: in the plural; bytes are scaled.
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

        def report(done: int, total: int | None) -> None:
            nonlocal first, tenths
            first = done if first is None else first
            if done == total and not tenths:  # finished at once: not worth a line
                return
            if total and done * 10 // total > tenths:
                tenths = done * 10 // total
                left = (time.monotonic() - began) * (total - done) / max(done - first, 1)
                rest = f", about {left:,.0f} s left" if done > first and done < total else ""
                self.note(f"{name}: {done:,} of {total:,} {unit}{rest}")

        return report
