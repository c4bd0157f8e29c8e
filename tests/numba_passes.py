"""Processes of a test with numba and without, and what they enter of the passes that it compiles."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fasttfm.cpu import attention_pass, step_passes, training_passes


def skip_without(numba: str) -> None:
    """Skip a test that is to run with "numba" where that is not installed."""
    if numba == "numba" and not step_passes.usable():
        pytest.skip("numba is not installed")


def passes_entered(numba: bool, tell: Callable[[str], object] = lambda name: None) -> set[str]:
    """Let this process run with or without numba; the set in which the passes that it enters are named from now on.

    tell: called with the name of each when it is entered for the first time.
    """
    entered: set[str] = set()
    if not numba:
        sys.modules["numba"] = None  # type: ignore[assignment]
        step_passes.usable.cache_clear()
        assert not step_passes.usable()
    elif step_passes.usable():
        passes, attention = training_passes.loops, attention_pass._loops

        def told(name: str) -> None:
            entered.add(name)
            tell(name)

        @functools.cache
        def loops(module: str = "training_loops") -> _Loops:
            return _Loops(passes(module), told)

        training_passes.loops = loops
        attention_pass._loops = functools.cache(lambda: _Loops(attention(), told))
    return entered


class _Loops:
    """The module of the compiled passes, by name; tells which of them were asked for."""

    def __init__(self, loops: Any, tell: Callable[[str], object]) -> None:
        self._loops, self._tell = loops, tell

    def __getattr__(self, name: str) -> Any:
        self._tell(name)
        value = getattr(self._loops, name)
        setattr(self, name, value)
        return value
