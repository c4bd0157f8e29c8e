"""Numbers that decide a dropout: the seed of a pass, and the site, which tells the dropouts of a model apart."""

from enum import IntEnum
from typing import Any

from torch import Tensor

from fasttfm.blocks.inspect import DROPOUT, untouched
from fasttfm.functional.dropout import Dropout


class Site(IntEnum):
    """Sites of a layer's dropouts, each with a mask of its own; an encoder's layer has no memory to attend to."""

    SELF_ATTENTION_WEIGHTS = 0
    HIDDEN = 1
    SELF_ATTENTION = 2
    CROSS_ATTENTION = 3
    FEED_FORWARD = 4
    CROSS_ATTENTION_WEIGHTS = 5


def dropout_of(module: Any, seed: Tensor | None = None, site: int = 0) -> Any:
    """The dropout that module is, with a layer's seed; the module itself where it is more than nn.Dropout."""
    return Dropout(module.p if module.training else 0.0, seed, int(site)) if untouched(module, DROPOUT) else module
