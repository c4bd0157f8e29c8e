"""Environment variables of the libraries below torch, which read them once at load time.

oneDNN caches code and buffers for up to 1,024 shapes, gigabytes in all; training batches have few shapes and need fewer
entries. OpenMP's wait policy is left alone: sleeping threads yield to busy neighbours but halve the speed of an idle
machine.
"""

import os
import sys

_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}


def choose_settings() -> str:
    """Set the variables that the user has not set, before torch is loaded; returns a text that lists them."""
    if "torch" in sys.modules:
        return ""
    chosen = {name: value for name, value in _CACHES.items() if name not in os.environ}
    os.environ.update(chosen)
    return "".join(f"; {name}={value}" for name, value in chosen.items())
