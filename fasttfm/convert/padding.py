"""Padding anywhere in a row, for models that want it on the right.

A mask's tokens are moved to the left in their order, and what is computed of them back to where they stood: padding is
never attended to and has no position, so a row gives the same wherever its padding is.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Places of the tokens of a batch (B, L)."""

    lengths: Tensor | None = None
    """Tokens of each row, (B,); None: no padding."""
    order: Tensor | None = None
    """Order of the columns of each row, (B, L); None if padding is on the right already."""

    @classmethod
    def of(cls, mask: Tensor | None, tokens: Tensor, name: str) -> "Rows":
        """The rows of a mask (B, L), 1 or True at tokens. ValueError, which names it, for another shape or other
        numbers."""
        if mask is None:
            return cls()
        if mask.shape != tokens.shape[:2]:
            shapes = tuple(mask.shape), tuple(tokens.shape[:2])
            raise ValueError(f"{name} is {shapes[0]}: it must be {shapes[1]}, 1 at tokens and 0 at padding")
        kept = mask.bool()
        if mask.dtype != torch.bool and not torch.equal(kept.to(mask.dtype), mask):
            raise ValueError(
                f"{name} has other numbers than 1 (a token) and 0 (padding): added masks are not supported"
            )
        lengths = kept.sum(dim=1)
        columns = torch.arange(kept.shape[1], device=kept.device)
        if torch.equal(kept, columns < lengths[:, None]):
            return cls(lengths)
        return cls(lengths, (~kept).byte().argsort(dim=1, stable=True))

    def packed(self, x: Tensor) -> Tensor:
        """x (B, L, ...) with padding on the right."""
        return x if self.order is None else x.gather(1, _like(self.order, x, 1))

    def unpacked(self, x: Tensor, dim: int = 1) -> Tensor:
        """Put what was computed of packed() back along a dimension."""
        return x if self.order is None else x.gather(dim, _like(self.order.argsort(dim=1), x, dim))


def _like(order: Tensor, x: Tensor, dim: int) -> Tensor:
    """An order (B, L) for gathering from x along dim, with B in front."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = order.shape
    return order.view(shape).expand(*(order.shape[1] if each == dim else size for each, size in enumerate(x.shape)))
