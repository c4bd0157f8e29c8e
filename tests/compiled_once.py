"""Makes test processes share compilations of numba: one compiles a loop, the others wait and load it from the cache."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

FOLDER = "LOOPS_LOCKED_IN"
"""Environment variable: the folder of the locks, one per loop; subprocesses of tests inherit it."""
_COMPILING: set[str] = set()
"""Loops whose lock this process holds; compile() may be wrapped once per test folder."""


def compiling_once(folder: Path) -> Callable[[Dispatcher, Any], Any]:
    """A replacement for Dispatcher.compile."""
    plain = Dispatcher.compile

    def compile(self: Dispatcher, signature: Any) -> Any:
        name = self.__name__
        if isinstance(self._cache, NullCache) or name in _COMPILING:  # inlined, or the lock is held
            return plain(self, signature)
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _COMPILING.add(name)
            try:
                return plain(self, signature)
            finally:
                _COMPILING.discard(name)

    return compile


def compile_once_from_now_on() -> None:
    """Replace Dispatcher.compile in a subprocess of a test, if its worker has replaced it."""
    if FOLDER in os.environ:
        Dispatcher.compile = compiling_once(Path(os.environ[FOLDER]))
