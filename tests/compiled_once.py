"""Loops of numba that several processes need: one compiles, the others wait and load what it left in numba's cache."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

FOLDER = "LOOPS_LOCKED_IN"
"""Environment variable of the folder with a lock for each loop; processes that tests start inherit it."""
_COMPILING: set[str] = set()
"""Loops whose lock this process holds: the fixture stands once for each folder of tests that one run takes."""


def compiling_once(folder: Path) -> Callable[[Dispatcher, Any], Any]:
    """What takes the place of Dispatcher.compile."""
    plain = Dispatcher.compile

    def compile(self: Dispatcher, signature: Any) -> Any:
        name = self.__name__
        if isinstance(self._cache, NullCache) or name in _COMPILING:  # inlined into a loop that is; held already
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
    """Do so in a process that a test has started, if its worker does."""
    if FOLDER in os.environ:
        Dispatcher.compile = compiling_once(Path(os.environ[FOLDER]))
