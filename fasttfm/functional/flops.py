"""Operators as torch.utils.flop_counter counts them.

Importing that module imports Triton, which importing fasttfm must not. So the formulas are registered where a counter
is on, with it too: it has copied what was registered before.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

formulas: dict[Any, Callable[..., int]] = {}
"""By packet of torch.ops, of a call's arguments: floating-point operations, two for a multiplication and its sum."""


def count_operators(modes: Sequence[Any]) -> None:
    """Registers the formulas, with the counters among these dispatch modes too."""
    if "torch.utils.flop_counter" not in sys.modules:
        return
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for packet, formula in formulas.items():
        if packet not in flop_registry:
            register_flop_formula(packet, get_raw=True)(formula)
    for mode in modes:
        counts = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(counts, dict):
            counts.update((packet, flop_registry[packet]) for packet in formulas if packet not in counts)
