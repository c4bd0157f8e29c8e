"""Facts of one forward pass that a stack tells its layers: nothing of them is asked again, or found by other ways."""

from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor

from fasttfm.blocks.merging import Weights
from fasttfm.functional.dropout import LEAST_P, NO_DROPOUT, Dropout


class Pass(NamedTuple):
    """One layer's part of a forward pass; a layer that is used twice is given other sites the second time."""

    seed: Tensor | None = None
    """(1,) int64, of all dropouts; None: nothing is dropped."""
    first_site: int = 0
    """Of the layer's dropouts."""
    plain: bool = False
    """Whether all modules of the layer may be computed inside fused operators, as plain_width() says; else each is
    asked."""
    choice: str | None = None
    """auto or triton, as the operators are asked for; torch where no kernel takes the stack's tensors; None: to be
    asked."""
    weights: Weights | None = None
    """Tensors that are read in the place of parameters."""

    def dropout(self, site: IntEnum, p: float) -> Dropout:
        """The dropout with probability p at a site of the layer."""
        if self.seed is None or p <= LEAST_P:
            return NO_DROPOUT
        return Dropout(p, self.seed, self.first_site + site)

    def read(self, *parameters: Any) -> Any:
        """Tensors that stand for parameters, or for None."""
        values = None if self.weights is None else self.weights.values
        return parameters if values is None else [values.get(id(each), each) for each in parameters]


ALONE = Pass()
"""A layer that is called by itself."""
