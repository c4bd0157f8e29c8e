"""A call of a norm, and what its backward pass is given."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.dropout import NO_DROPOUT, Dropout
from fasttfm.functional.record import Whole


class Normalised(NamedTuple):
    """Tensors that a norm leaves for its backward pass."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None


class Call(NamedTuple):
    x: Tensor
    x_bias: Tensor | None
    residual: Tensor | None
    """None for a norm alone, without dropout."""
    weight: Tensor | None
    bias: Tensor | None
    seed: Whole | None
    """None: nothing is dropped."""
    eps: float
    dropout_p: float
    site: int
    twice: bool
    """Whether to return once more what the residual stream goes on with: y, or x without a residual."""
    rms: bool
    route: str

    @property
    def dropout(self) -> Dropout:
        return NO_DROPOUT if self.seed is None else Dropout(self.dropout_p, self.seed, self.site)


class Saved(NamedTuple):
    s: Tensor
    """The sum, or x without a residual."""
    mean: Tensor
    """Of an RMSNorm not read."""
    rstd: Tensor
    x_bias: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    keep: Tensor | None
    seed: Whole | None
    dropout_p: float
    site: int
    dtype: torch.dtype
    """Of x."""
    eps: float
    joined: bool
    """Whether there was a residual."""
    rms: bool
    route: str

    @property
    def dropout(self) -> Dropout:
        return NO_DROPOUT if self.seed is None else Dropout(self.dropout_p, self.seed, self.site)

    @property
    def norm(self) -> Normalised:
        return Normalised(self.s, self.mean, self.rstd, self.weight, self.bias)

    @property
    def one_gradient(self) -> bool:
        """True if x and residual have the same gradient, which is then computed once."""
        return not self.joined or (self.dtype == self.s.dtype and self.seed is None)


class Backward(NamedTuple):
    dy: Tensor
    dy2: Tensor | None
    ds: Tensor | None
    saved: Saved
