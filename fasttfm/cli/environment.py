"""Settings of the libraries below torch, which read them once, when they are loaded.

oneDNN keeps code and memory for every product of a new shape, up to 1,024 of them and gigabytes; training needs fewer,
because its batches come in few shapes. How OpenMP's threads wait is left alone: threads that sleep give way to a busy
neighbour, and halve the speed of an idle machine.
"""

import os
import sys

_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}


def choose_settings() -> str:
    """Set environment variables that the user has not set, before torch is loaded; returns a text that names them."""
    if "torch" in sys.modules:
        return ""
    chosen = {name: value for name, value in _CACHES.items() if name not in os.environ}
    os.environ.update(chosen)
    return "".join(f"; {name}={value}" for name, value in chosen.items())
