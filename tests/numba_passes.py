"""Processes with and without numba, and the compiled loops that they enter."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fasttfm.cpu import step_passes, training_passes


def skip_without(numba: str) -> None:
    """Skip a test that runs with "numba" if it is not installed."""
    if numba == "numba" and not step_passes.usable():
        pytest.skip("numba is not installed")


def passes_entered(numba: bool, tell: Callable[[str], object] = lambda name: None) -> set[str]:
    """Enable or disable numba in this process; returns a set to which each training loop's name is added on entry.

    tell: called with the name on the first entry.
    """
    entered: set[str] = set()
    if not numba:
        sys.modules["numba"] = None  # type: ignore[assignment]
        step_passes.usable.cache_clear()
        assert not step_passes.usable()
    elif step_passes.usable():
        load = training_passes.loops

        def enter(name: str) -> None:
            entered.add(name)
            tell(name)

        training_passes.loops = functools.cache(lambda module: _Loops(load(module), enter))
    return entered


class _Loops:
    """A module of compiled loops that reports the first access to each."""

    def __init__(self, loops: Any, tell: Callable[[str], object]) -> None:
        self._loops, self._tell = loops, tell

    def __getattr__(self, name: str) -> Any:
        self._tell(name)
        value = getattr(self._loops, name)
        setattr(self, name, value)
        return value
