"""Progress of a training run: a bar on a terminal, plain lines otherwise."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

_BAR = "{percentage:3.0f}%|{bar:20}|{postfix}"
_SECONDS_BETWEEN_DRAWINGS = 0.5
_hushed = False


@contextmanager
def hushed(quiet: bool = True) -> Iterator[None]:
    """Suppress bars and lines, except warnings, within the block if quiet."""
    global _hushed
    before, _hushed = _hushed, _hushed or quiet
    try:
        yield
    finally:
        _hushed = before


class Progress:
    """Shows updates, loss, learning rate, tokens/s, padding and time left, without reading tensors.

    If writing fails (`| head`, a closed terminal, a full disk) it falls silent and training continues; the log has the
    same numbers.
    """

    def __init__(self, output: TextIO | None = None) -> None:
        """output: None: standard error."""
        self.output = output or sys.stderr
        self._drawn = 0.0
        self._text = "starting"
        self._bar: Any = None
        if self.output.isatty() and not _hushed:
            self._bar = tqdm(total=1.0, file=self.output, dynamic_ncols=True, bar_format=_BAR)

    def update(self, step: int, share: float, seconds_left: float) -> None:
        """Show that update `step`, and a share in [0, 1] of the run, is complete; at most twice per second."""
        now = time.monotonic()
        if self._bar is None or now - self._drawn < _SECONDS_BETWEEN_DRAWINGS:
            return
        self._drawn = now
        self._bar.n = share
        text = f"{duration(seconds_left)} left, update {step:,}, {self._text}"  # narrow terminals truncate the end
        self._write(lambda: self._bar.set_postfix_str(text, refresh=True))

    def train(self, record: dict[str, Any], share: float, seconds_left: float) -> None:
        """Show the numbers of a log record."""
        self._text = (
            f"loss {record['loss']:.3f}, lr {record['lr']:.2e}, {record['tokens_per_second']:,.0f} tokens/s, "
            f"{record['padding']:.0%} padding"
        )
        if self._bar is None:
            left = duration(seconds_left)
            self.say(f"{share:4.0%}, update {record['step']:,}, epoch {record['epoch']}, {self._text}, {left} left")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            tell(line, self.output)
        else:
            self._write(lambda: self._bar.write(line, file=self.output))

    def close(self) -> None:
        """Finish the bar and start a new line."""
        if self._bar is not None:
            self._write(self._bar.close)
            self._bar = None

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError:
            self._bar = None
            _silence(self.output)


def tell(line: str, output: TextIO | None = None) -> None:
    """Print a line to output (None: standard error); errors are ignored."""
    output = output or sys.stderr
    if _hushed and not line.startswith("warning"):
        return
    try:
        print(line, file=output, flush=True)
    except OSError:
        _silence(output)


def _silence(output: TextIO) -> None:
    """Redirect a stream to /dev/null, because Python would write again, and report an error, at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    except (OSError, ValueError):  # no file descriptor
        return


def duration(seconds: float) -> str:
    """Format seconds: 75 -> 1:15, 3725 -> 1:02:05."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
