"""Padding anywhere in a row, for models that need it on the right.

Tokens are moved to the left in order, and results are moved back: padding is not attended to and has no position, so
results do not depend on where a row is padded.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Positions of the tokens in a batch (B, L)."""

    lengths: Tensor | None = None
    """Tokens per row (B,); None: no padding."""
    order: Tensor | None = None
    """Order of the columns in each row (B, L); None if padding is on the right already."""

    @classmethod
    def of(cls, mask: Tensor | None, tokens: Tensor, name: str) -> "Rows":
        """Build from a mask (B, L), 1 or True at tokens. ValueError for another shape or other values of `name`."""
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
        """Move the padding of x (B, L, ...) to the right."""
        return x if self.order is None else x.gather(1, _like(self.order, x, 1))

    def unpacked(self, x: Tensor, dim: int = 1) -> Tensor:
        """Undo packed() along a dimension of a result."""
        return x if self.order is None else x.gather(dim, _like(self.order.argsort(dim=1), x, dim))


def _like(order: Tensor, x: Tensor, dim: int) -> Tensor:
    """Expand an order (B, L) to an index for x.gather(dim); B is the first dimension."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = order.shape
    return order.view(shape).expand(*(order.shape[1] if each == dim else size for each, size in enumerate(x.shape)))
