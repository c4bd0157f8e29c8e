"""Log-probabilities of given translations, for reranking and filtering."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fasttfm.data.shapes import length_batches, round_length
from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.errors import UserError
from fasttfm.search.batches import LENGTHS, inference, padded
from fasttfm.search.decoder import refuse_longer
from fasttfm.search.hypotheses import NOT_A_NUMBER

if TYPE_CHECKING:
    from fasttfm.models import Transformer


def score_ids(
    model: Transformer, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int = 1024
) -> list[float]:
    """log P(target, end-of-sentence | source) of each pair, natural log, in order.

    sources: ids with end-of-sentence; targets: ids without. max_tokens: padded target tokens per batch; the logits
    take 4 * V bytes per token. On a CPU a score has the same bits whatever its batch. Raises ValueError for lists of
    different lengths or an empty source, UserError if probabilities are NaN or a pair is longer than the positions.
    """
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources but {len(targets)} targets: give pairs")
    refuse_longer(model, map(len, sources), (len(target) + 1 for target in targets))
    scores = [0.0] * len(sources)
    with inference(model, batch_invariant=True) as device:
        for batch, inputs in pair_batches(sources, targets, max_tokens, device):
            target_out, target_lengths = padded([[*targets[index], EOS] for index in batch], device, LENGTHS)
            logits = model(*inputs).float()  # (B, L, V)
            gained = logits.gather(2, target_out[:, :, None])[:, :, 0] - logits.logsumexp(dim=2)  # (B, L)
            counted = torch.arange(gained.shape[1], device=device) < target_lengths[:, None]
            for index, score in zip(batch, gained.masked_fill(~counted, 0.0).sum(dim=1).tolist()):
                if math.isnan(score):
                    raise UserError(NOT_A_NUMBER)
                scores[index] = score
    return scores


def pair_batches(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int, device: torch.device
) -> Iterator[tuple[list[int], tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Yield batches of pairs with one padded source length and one padded target length: indices and model inputs.

    The inputs are sources (B, S), targets after begin-of-sentence (B, L), and the lengths (B,) of both.
    """
    by_source: dict[int, list[int]] = {}
    for index, source in enumerate(sources):
        by_source.setdefault(round_length(len(source), LENGTHS), []).append(index)
    for length, indices in by_source.items():
        lengths = [len(targets[index]) + 1 for index in indices]
        for batch in length_batches(lengths, max_tokens, length, alike=LENGTHS):
            pairs = [indices[row] for row in batch]
            source_ids, source_lengths = padded([sources[index] for index in pairs], device, LENGTHS)
            target_ids, target_lengths = padded([[BOS, *targets[index]] for index in pairs], device, LENGTHS)
            yield pairs, (source_ids, target_ids, source_lengths, target_lengths)
