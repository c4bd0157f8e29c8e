"""Sinusoids added to embeddings."""

import torch
from torch import Tensor, nn

from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.functional.signature import checks_arguments, names_arguments
from fasttfm.models.embedding import Sinusoids
from fasttfm.nn.errors import check_dropout, check_sizes


class PositionalEncoding(Sinusoids):
    """dropout(x + PE), with the sinusoids of the paper (section 3.5) or of tensor2tensor.

    d_model: even width; dropout; max_length: positions in the table; variant: 'paper' interleaves
    sin(pos / 10000^(2i/d)) and cos, 'tensor2tensor' puts all sines of pos / 10000^(i/(d/2-1)) before the cosines;
    batch_first as in the layers. The table is a buffer, no parameter, and not part of the state dict.
    Raises ArgumentError for an odd width, an unknown variant or a sequence longer than the table.
    """

    @checks_arguments
    def __init__(
        self,
        d_model: int,
        dropout: float = 0.1,
        max_length: int = 5000,
        variant: str = "paper",
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dropout(dropout)
        check_sizes(max_length=max_length)
        if d_model % 2 or d_model <= 0:
            raise ArgumentError(f"d_model is {d_model} but must be even: sines and cosines come in pairs")
        if variant not in ("paper", "tensor2tensor"):
            raise ArgumentError(f"variant is {variant!r}: choose paper or tensor2tensor")
        super().__init__(max_length, d_model, variant, device, dtype)
        self.batch_first = batch_first
        self.dropout = nn.Dropout(dropout)

    @names_arguments
    def forward(self, x: Tensor, first_position: int = 0) -> Tensor:
        """x (L, N, E), (N, L, E) with batch_first, or unbatched (L, E); the same shape and dtype comes back.

        first_position is the number of the first element, for sequences that come piece by piece.
        """
        batched = x.dim() == 3
        dim = 1 if batched and self.batch_first else 0
        last = first_position + (x.shape[dim] if x.dim() else 0)
        width = self.table.shape[1]
        if x.dim() not in (2, 3) or x.shape[-1] != width or not 0 <= first_position <= last <= self.table.shape[0]:
            raise ArgumentError(
                f"x {tuple(x.shape)} from position {first_position} does not fit: it must be 2-D or 3-D, "
                f"{width} wide, begin at 0 or later, and end by position {self.table.shape[0]} (max_length)"
            )
        if x.device != self.table.device:
            raise ArgumentError(f"x is on {x.device} but the module is on {self.table.device}: move one of them")
        if not x.is_floating_point():
            raise ArgumentTypeError(f"x has dtype {x.dtype}: a floating type is needed")
        positions = self.table[first_position:last].to(x.dtype)
        return self.dropout(x + (positions[:, None] if batched and not self.batch_first else positions))

    def extra_repr(self) -> str:
        length, width = self.table.shape
        return f"{width}, max_length={length}, variant={self.variant!r}, batch_first={self.batch_first}"
