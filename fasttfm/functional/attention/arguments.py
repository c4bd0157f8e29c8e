"""Records of attention's arguments besides query, key and value."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fasttfm.functional.dropout import dropout_for
from fasttfm.functional.operator import Mask, Size, Whole

Window = tuple[int | None, int | None]
"""Keys before the diagonal and past it that a query may attend, None for no bound."""

LARGEST = 1e30
"""Of a scale, a soft cap and a slope, in size, and what larger sinks count as: float32 holds it times any distance."""


class Options(NamedTuple):
    """Everything but query, key and value, as the kernels name it.

    Query i sees keys up to i + causal_offset if causal, and from i + causal_offset - window on if window is not -1.
    """

    key_lengths: Whole | None
    mask: Mask | None
    causal: bool
    causal_offset: Size
    dropout_p: float
    scale: float
    seed: Whole | None
    site: int
    offsets: Whole | None = None
    """(B,), of each batch row, added to causal_offset."""
    window: Size = -1
    softcap: float = 0.0
    slopes: Tensor | None = None
    """(B, H) or (1, H) float32, beside float64 of it, of ALiBi."""
    past: Size = 0
    """Keys past the diagonal that causal_offset lets a query see: ALiBi counts from the diagonal."""
    sinks: Tensor | None = None
    """(H,)"""

    @classmethod
    def of(
        cls, heads: Tensor, key_lengths: Tensor | None, mask: Tensor | None, causal: bool | str,
        causal_offset: int | Tensor, dropout_p: float, scale: float | None, seed: Tensor | None, site: int,
    ) -> Options:  # fmt: skip
        """With the scale and the seed that a call without them takes on heads (..., D). Raises ValueError for numbers
        out of range."""
        dropout_p, seed, site = dropout_for(heads.device, dropout_p, seed, site, "query")
        if scale is None:
            scale = heads.shape[-1] ** -0.5
        elif not -LARGEST <= scale <= LARGEST:
            raise ValueError(f"scale={scale!r} must be a number between {-LARGEST} and {LARGEST}")
        scale = scale * 1.0  # a whole number may have more than 64 bits
        # causal and causal_offset of other types are with_scoring()'s to read, or the operator's to refuse
        return cls(key_lengths, mask, causal, causal_offset, dropout_p, scale, seed, site)  # type: ignore[arg-type]

    @property
    def plain(self) -> bool:
        """True without what only some routes compute: offsets by batch row, a left border, a cap, slopes, sinks."""
        without = self.offsets is self.slopes is self.sinks is None
        return without and self.window == -1 and self.softcap == 0.0

    def of_reference(self) -> dict[str, Any]:
        """For reference.attention()."""
        diagonal = self.causal_offset - self.past
        names = ("mask", "softcap", "sinks", "dropout_p", "scale", "seed", "site")
        return {
            **{name: getattr(self, name) for name in names},
            **({} if self.key_lengths is None else {"key_lengths": self.key_lengths}),
            "alibi_slopes": self.slopes,
            "causal_offset": diagonal if self.offsets is None else self.offsets + diagonal,
            "window": (None if self.window == -1 else self.window - self.past, self.past if self.causal else None),
        }

    def arguments(self) -> dict[str, Any]:
        """For kernels."""
        return dict(zip(self._fields, self[:8] if self.plain else self))


class Sequences(NamedTuple):
    """Sequences one after the other on both sides."""

    cu_seqlens_q: Whole
    """(B + 1,) int32 or int64: where each begins among the queries, and the end of the last."""
    cu_seqlens_k: Whole
    """Likewise among the keys."""
    max_seqlen_q: Size
    """No sequence has more queries."""
    max_seqlen_k: Size
    """No sequence has more keys."""

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1
