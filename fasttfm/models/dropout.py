"""Seeds and sites of a model's dropouts: a seed for a whole pass, a site for each dropout in it."""

from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor

from fasttfm.functional.dropout import LEAST_P, NO_DROPOUT, Dropout
from fasttfm.models.plain import DROPOUT, untouched

SITES_PER_LAYER = 8
"""Numbers reserved for the dropouts of a layer."""


class Site(IntEnum):
    """Sites of a layer's dropouts, each with a mask of its own; an encoder's layer has no memory to attend to."""

    SELF_ATTENTION_WEIGHTS = 0
    HIDDEN = 1
    SELF_ATTENTION = 2
    CROSS_ATTENTION = 3
    FEED_FORWARD = 4
    CROSS_ATTENTION_WEIGHTS = 5


class LayerSeed(NamedTuple):
    """Seed of a layer's dropouts; a layer that is used twice is given other sites the second time."""

    seed: Tensor | None = None
    """(1,) int64, of the whole pass; None: nothing is dropped."""
    first_site: int = 0

    def dropout(self, site: int, p: float) -> Dropout:
        """The dropout with probability p at a site of the layer."""
        return NO_DROPOUT if self.seed is None or p <= LEAST_P else Dropout(p, self.seed, self.first_site + site)


NO_SEED = LayerSeed()


def dropout_of(module: Any, seed: Tensor | None = None, site: int = 0) -> Any:
    """The dropout that module is, with a layer's seed; the module itself where it is more than nn.Dropout."""
    return Dropout(module.p if module.training else 0.0, seed, int(site)) if untouched(module, DROPOUT) else module
