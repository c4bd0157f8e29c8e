"""The probability of given translations: for reranking, filtering and finding out what a model thinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.shapes import length_batches
from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.decoding.batches import inference, padded
from fasttfm.decoding.hypotheses import NOT_A_NUMBER, Hypothesis, length_penalty
from fasttfm.errors import UserError

if TYPE_CHECKING:
    from fasttfm.models import Transformer


def score_ids(
    model: Transformer, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int = 1024
) -> list[float]:
    """log P(target, end-of-sentence | source) of each pair, natural logarithm, in order.

    sources: ids with end-of-sentence. targets: ids without. max_tokens: padded target tokens of a batch; the logits
    take 4 * V bytes for each. Raises ValueError for lists of different lengths or an empty source, UserError for a
    model whose weights give no probabilities.
    """
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources but {len(targets)} targets: give pairs")
    scores = [0.0] * len(sources)
    longer = [max(len(source), len(target) + 1) for source, target in zip(sources, targets)]
    with inference(model) as device:
        for batch in length_batches(longer, max_tokens):
            source, source_lengths = padded([sources[place] for place in batch], device)
            target_in, target_lengths = padded([[BOS, *targets[place]] for place in batch], device)
            target_out, _ = padded([[*targets[place], EOS] for place in batch], device)
            logits = model(source, target_in, source_lengths, target_lengths).float()  # (B, L, V)
            gained = logits.gather(2, target_out[:, :, None])[:, :, 0] - logits.logsumexp(dim=2)  # (B, L)
            counted = torch.arange(gained.shape[1], device=device) < target_lengths[:, None]
            for place, score in zip(batch, gained.masked_fill(~counted, 0.0).sum(dim=1).tolist()):
                if math.isnan(score):
                    raise UserError(NOT_A_NUMBER)
                scores[place] = score
    return scores


def score_by_itself(
    model: Transformer, source: Sequence[int], hypotheses: Sequence[Hypothesis], config: DecodingConfig
) -> list[Hypothesis]:
    """The hypotheses of one source (ids with end-of-sentence), scored with nothing else in the batch, best first.

    Sums of float32 depend on the shape of a batch in their last digits; these scores depend on the sentence alone.
    """
    tokens = [hypothesis.tokens for hypothesis in hypotheses]
    scored = [
        Hypothesis(output, log_probability / length_penalty(len(output) + 1, config), log_probability)
        for output, log_probability in zip(tokens, score_ids(model, [source] * len(tokens), tokens))
    ]
    return sorted(scored, key=lambda each: -each.score)
