"""Calls of compiled loops that are recorded once and then made together.

A call from Python passes a dozen arrays to a loop in five to ten microseconds, and a decoder step makes seventy, always
with the same arrays: for a few rows that takes longer than the products. Launches keeps the calls as the blocks of
arguments that the threads read (thread_team.py), and one call runs them all.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fasttfm.cpu.loop_parts import loop
from fasttfm.cpu.thread_team import RECORD_HEAD, launch, team

_WORDS = 1 << 9
"""Twice the words of the longest record, of a loop with twelve arrays of up to 13 words."""


@loop()
def _launch_all(team, records):
    for n in range(len(records)):
        launch(team, np.int64(records[n]))


class Launches:
    """Calls of compiled loops with fixed arguments, of which the arrays' content may change."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        """Records, and the arrays that they point to."""
        self._runs: list[Any] = []
        """In order: the addresses of records that follow one another, as an array, or a function."""
        self._addresses: list[int] = []

    def add(self, loop: Any, *args: Any) -> None:
        """Record loop(team, *args)."""
        record = np.zeros(_WORDS, np.int64)
        record[1] = record[RECORD_HEAD:].nbytes
        loop(team(record.ctypes.data), *args)
        if not record[0]:  # the loop has nothing to do
            return
        record = record[: RECORD_HEAD + -(-record[1] // record.itemsize)].copy()
        self._kept.append((record, args))
        self._addresses.append(record.ctypes.data)

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function at this point."""
        self._end_run()
        self._runs.append(function)

    def _end_run(self) -> None:
        if self._addresses:
            self._runs.append(np.array(self._addresses, np.int64))
            self._addresses = []

    def __call__(self) -> None:
        """Make all calls, in order."""
        self._end_run()
        for each in self._runs:
            if callable(each):
                each()
            else:
                _launch_all(team(), each)
