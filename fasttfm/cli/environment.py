"""Settings of the libraries below torch, which read them once, when they are loaded.

A thread of OpenMP that has nothing to do spins for milliseconds in the hope of more. That is quickest on an idle
machine and stops everything where another program wants the same core: the thread with work waits for the one that
spins. So threads sleep instead. oneDNN keeps code and memory for every product of a new shape, up to 1,024 of them and
gigabytes; training needs fewer, because its batches come in few shapes.
"""

from __future__ import annotations

import os
import sys

_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
_WAITING_BY_USER = (*_WAITING, "KMP_BLOCKTIME")


def choose_settings() -> str:
    """Set what the user has not set, before torch is loaded; returns what was set, to be shown behind a line."""
    if "torch" in sys.modules:
        return ""
    chosen = {} if any(name in os.environ for name in _WAITING_BY_USER) else dict(_WAITING)
    chosen |= {name: value for name, value in _CACHES.items() if name not in os.environ}
    os.environ.update(chosen)
    return "".join(f"; {name}={value}" for name, value in chosen.items())
