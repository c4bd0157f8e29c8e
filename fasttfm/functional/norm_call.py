"""A call of a norm, and what its backward pass is given."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.functional.record import Whole


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
    rms: bool
    route: str


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
    def one_gradient(self) -> bool:
        """True if x and residual have the same gradient, which is then computed once."""
        return not self.joined or (self.dtype == self.s.dtype and self.seed is None)


class Backward(NamedTuple):
    dy: Tensor
    dy2: Tensor | None
    """To be added to dy: of another use of y."""
    ds: Tensor | None
    saved: Saved
