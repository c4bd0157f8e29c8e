"""Token-budget batches of pairs of similar length, in an order that depends on (seed, epoch) alone.

Pairs are padded to a few dozen sizes (fasttfm.data.shapes). Pairs of one size fill a batch while rows * width stays
within max_tokens, where width is the longer padded side. Batch boundaries depend on lengths alone, so every epoch has
the same shapes and the largest is known before training. (seed, epoch) determines which pairs of a size share a batch,
and the order of the batches (fasttfm.data.epochs).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fasttfm.data.epochs import PlannedBatches
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.shapes import SIZES, choose_sizes, plan_batches
from fasttfm.data.tensor_batch import TensorBatch
from fasttfm.data.tokenizer import BOS, EOS, PAD


@dataclass(frozen=True, slots=True)
class Batch(TensorBatch):
    """B pairs, padded with 0 on the right. Lengths and token counts include eos but not bos."""

    source: torch.Tensor
    """(B, S) int64: the tokens, then eos."""
    source_lengths: torch.Tensor
    """(B,) int64."""
    target_in: torch.Tensor
    """(B, L) int64: bos, then the tokens."""
    target_out: torch.Tensor
    """(B, L) int64: the tokens, then eos; target_out[:, t] is the token after target_in[:, :t + 1]."""
    target_lengths: torch.Tensor
    """(B,) int64."""
    source_tokens: int
    """Source tokens without padding."""
    target_tokens: int
    """Target tokens without padding: the number of terms of the loss."""

    def __len__(self) -> int:
        return len(self.source)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, padded source length, padded target length."""
        return len(self.source), self.source.shape[1], self.target_in.shape[1]

    @property
    def cells(self) -> int:
        """Elements of the two padded matrices."""
        return self.source.numel() + self.target_in.numel()

    @property
    def padding_ratio(self) -> float:
        """Share of padding in the two padded matrices."""
        return 1.0 - (self.source_tokens + self.target_tokens) / self.cells


class TokenBatches(PlannedBatches):
    """Training batches.

    max_tokens: the largest rows * max(S, L) of a batch, eos included. max_length: pairs with more tokens than this on
    either side (without eos), or too long for max_tokens, are skipped; `skipped` counts them. together: batches per
    update; an update mixes batches of all lengths.
    """

    unit = "pair"
    most_sizes = SIZES

    def __init__(
        self,
        pairs: ParallelTokens,
        max_tokens: int,
        seed: int = 0,
        max_length: int | None = None,
        *,
        together: int = 1,
        longer: float = 1.0,
    ) -> None:
        """longer: factor on all lengths when planning batches."""
        self.pairs = pairs
        self.max_tokens = max_tokens
        source, target = (
            _widths(side, max_tokens, max_length, longer) for side in (pairs.source_lengths, pairs.target_lengths)
        )
        sizes = choose_sizes(source, target, max_tokens, self.most_sizes)
        if not len(sizes):
            raise ValueError(f"no pair has at most {max_length} tokens on each side and fits batches of {max_tokens}")
        plan = plan_batches(source, target, sizes, max_tokens)
        super().__init__(plan, len(pairs), seed, together)
        self.skipped = len(pairs) - len(plan.order)
        """Number of pairs skipped for their length."""
        kept = (source > 0) & (target > 0)
        self._planned = sum(int(side.sum(where=kept, dtype=np.int64)) for side in (source, target))
        self.target_tokens = int(pairs.target_lengths.sum(where=kept, dtype=np.int64)) + len(plan.order)
        """Target tokens per epoch, eos included, without padding."""

    @property
    def padding_ratio(self) -> float:
        """Planned share of padding over an epoch, source and target together."""
        return 1.0 - self._planned / float(self._cells.sum())

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """The tensors of (part of) a batch of epoch()."""
        source, target = map(self.pairs.source, indices), map(self.pairs.target, indices)
        return collate([*source], [*target], self.padded_to(indices[0]))


def _widths(lengths: np.ndarray, max_tokens: int, max_length: int | None, longer: float) -> np.ndarray:
    """(pairs,) int32: planned widths, `longer` times the length with eos; 0 for sentences that are too long."""
    width = np.arange(1, int(lengths.max(initial=0)) + 2, dtype=np.int64)  # by length
    planned = np.maximum(width, np.minimum(np.ceil(width * longer).astype(np.int64), max_tokens))
    planned[width > max_tokens] = 0
    if max_length is not None:
        planned[max_length + 1 :] = 0
    return planned.astype(np.int32)[lengths]


def collate(
    source: Sequence[Sequence[int] | np.ndarray],
    target: Sequence[Sequence[int] | np.ndarray],
    size: Sequence[int] | np.ndarray | None = None,
) -> Batch:
    """A batch of pairs of ids (without bos and eos), padded to size (S, L), by default to the longest of each side."""
    source_ids, source_lengths = pad_sentences(source, None if size is None else int(size[0]))
    target_out, target_lengths = pad_sentences(target, None if size is None else int(size[1]))
    target_in = np.full(target_out.shape, PAD, dtype=np.int64)
    target_in[:, 0] = BOS
    for row, ids in enumerate(target):
        target_in[row, 1 : len(ids) + 1] = ids
    return Batch(
        source=source_ids,
        source_lengths=source_lengths,
        target_in=torch.from_numpy(target_in),
        target_out=target_out,
        target_lengths=target_lengths,
        source_tokens=int(source_lengths.sum()),
        target_tokens=int(target_lengths.sum()),
    )


def pad_sentences(
    source: Sequence[Sequence[int] | np.ndarray], width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, S) int64 with eos after each sentence, and lengths (B,) int64 including it; S is width or the longest."""
    lengths = np.array([len(ids) + 1 for ids in source], dtype=np.int64)
    padded = np.full((len(source), int(lengths.max(initial=1)) if width is None else width), PAD, dtype=np.int64)
    for row, ids in enumerate(source):
        padded[row, : len(ids)] = ids
        padded[row, len(ids)] = EOS
    return torch.from_numpy(padded), torch.from_numpy(lengths)
