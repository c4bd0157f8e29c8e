"""Greedy search and sampling: one token is chosen for every row at every step, and that choice is final."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.decoding.hypotheses import Constraints, Hypothesis, length_penalty
from fasttfm.decoding.largest import largest

if TYPE_CHECKING:
    from fasttfm.models import Transformer


def greedy_search(
    model: Transformer,
    source: Tensor,
    source_lengths: Tensor | None,
    limits: list[int],
    constraints: Constraints,
    config: DecodingConfig,
) -> list[list[Hypothesis]]:
    """The likeliest token at every step; one hypothesis for each sentence. Arguments as in beam_search."""

    def likeliest(log_probabilities: Tensor, step: int, sentences: list[int]) -> Tensor:
        return largest(log_probabilities, 1)[1][:, 0]

    return _walk(model, source, source_lengths, limits, constraints, config, rows=1, choose=likeliest)


def sample(
    model: Transformer,
    source: Tensor,
    source_lengths: Tensor | None,
    limits: list[int],
    constraints: Constraints,
    config: DecodingConfig,
    numbers: Sequence[int],
) -> list[list[Hypothesis]]:
    """config.nbest independent draws for each sentence, best score first; arguments as in beam_search.

    numbers: one for each sentence, which with config.sampling_seed decides its random numbers; how sentences are
    batched does not.
    """
    uniform = np.stack(
        [
            np.random.default_rng([config.sampling_seed, number]).random((max(limits) + 1, config.nbest))
            for number in numbers
        ]
    )  # (B, steps, nbest)

    def draw(log_probabilities: Tensor, step: int, sentences: list[int]) -> Tensor:
        u = torch.from_numpy(uniform[sentences, step].reshape(-1).astype(np.float32)).to(log_probabilities.device)
        return draw_tokens(log_probabilities, u, config)

    return _walk(model, source, source_lengths, limits, constraints, config, rows=config.nbest, choose=draw)


def _walk(model, source, source_lengths, limits, constraints, config, *, rows, choose) -> list[list[Hypothesis]]:
    """Extend `rows` hypotheses of each sentence until all of them have ended; a sentence then leaves the batch.

    choose(log-probabilities (b * rows, V), step, sentences) returns the tokens (b * rows,) that follow.
    """
    device = source.device
    memory = model.encode(source, source_lengths)
    cache = model.start_cache(memory, source_lengths, rows_per_sentence=rows, max_length=max(limits) + 1)
    outputs: list[list[Hypothesis]] = [[] for _ in limits]

    # Of the b sentences still in the batch:
    sentences = list(range(len(limits)))
    tokens = torch.full((len(limits) * rows,), BOS, device=device)  # (b * rows,)
    scores = torch.zeros(len(limits) * rows, device=device)  # (b * rows,) log-probability
    open_rows = torch.ones(len(limits) * rows, dtype=torch.bool, device=device)  # (b * rows,) not ended yet
    history = torch.empty(len(limits) * rows, 0, dtype=torch.int64, device=device)  # (b * rows, step)

    for step in range(max(limits) + 1):
        logits = model.step(tokens, cache)  # (b * rows, V) float32
        log_probabilities = logits.log_softmax(dim=1)
        constraints.apply(log_probabilities, history, sentences)
        tokens = choose(log_probabilities, step, sentences)
        scores = torch.where(open_rows, scores + log_probabilities.gather(1, tokens[:, None])[:, 0], scores)

        ended = open_rows & (tokens == EOS)
        if ended.any():
            which = ended.nonzero()[:, 0]
            penalty = length_penalty(step + 1, config)
            for row, output, score in zip(which.tolist(), history[which].tolist(), scores[which].tolist()):
                outputs[sentences[row // rows]].append(Hypothesis(output, score / penalty, score))
            open_rows = open_rows & ~ended
            stay = open_rows.view(-1, rows).any(dim=1).nonzero()[:, 0]
            if not len(stay):
                break
            if len(stay) < len(sentences):
                cache.keep(stay)
                kept = (stay[:, None] * rows + torch.arange(rows, device=device)).view(-1)
                tokens, scores, open_rows, history = (part[kept] for part in (tokens, scores, open_rows, history))
                sentences = [sentences[place] for place in stay.tolist()]
        history = torch.cat([history, tokens[:, None]], dim=1)
    for hypotheses in outputs:
        hypotheses.sort(key=lambda each: -each.score)
    return outputs


def draw_tokens(log_probabilities: Tensor, uniform: Tensor, config: DecodingConfig) -> Tensor:
    """One token for each row of log_probabilities (N, V): where the cumulative distribution passes uniform (N,).

    Tokens stand in falling order of probability, so top-k and top-p (Holtzman et al. 2020) keep a beginning of the row.
    """
    width = log_probabilities.shape[1]
    values, ids = largest(log_probabilities, min(config.sampling_topk or width, width))
    probabilities = (values / config.temperature).softmax(dim=1)
    cumulative = probabilities.cumsum(dim=1)
    kept = cumulative - probabilities < config.sampling_topp  # the fewest that reach p
    kept &= probabilities > 0
    kept[:, 0] = True
    mass = cumulative.masked_fill(~kept, 0).amax(dim=1)
    place = (cumulative <= (uniform * mass)[:, None]).sum(dim=1)
    place = torch.minimum(place, kept.sum(dim=1) - 1)
    return ids.gather(1, place[:, None])[:, 0]
