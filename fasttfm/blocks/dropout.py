"""Numbers that decide a dropout: the seed of a pass, and the site, which tells the dropouts of a model apart."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor

from fasttfm.blocks.inspect import DROPOUT, untouched
from fasttfm.functional.dropout import NO_DROPOUT, Dropout


class EncoderSite(IntEnum):
    """Sites of an encoder layer's dropouts, each with a mask of its own."""

    ATTENTION_WEIGHTS = 0
    HIDDEN = 1
    ATTENTION = 2
    FEED_FORWARD = 3


class DecoderSite(IntEnum):
    """Sites of a decoder layer's dropouts, each with a mask of its own."""

    SELF_ATTENTION_WEIGHTS = 0
    HIDDEN = 1
    SELF_ATTENTION = 2
    CROSS_ATTENTION = 3
    FEED_FORWARD = 4
    CROSS_ATTENTION_WEIGHTS = 5


def dropout_of(module: Any, seed: Tensor | None = None, site: int = 0) -> Any:
    """The dropout that module is, with a layer's seed; the module itself where it is more than nn.Dropout."""
    return Dropout(module.p if module.training else 0.0, seed, int(site)) if untouched(module, DROPOUT) else module


class Dropouts(NamedTuple):
    """The dropouts of one layer in one pass; a layer that is used twice is given other sites the second time."""

    seed: Tensor | None = None
    """None: nothing is dropped."""
    first_site: int = 0
    """Of the layer."""

    def __call__(self, site: IntEnum, p: float) -> Dropout:
        """The dropout with probability p at a site of the layer."""
        return NO_DROPOUT if self.seed is None else Dropout(p, self.seed, self.first_site + int(site))


NO_DROPOUTS = Dropouts()
