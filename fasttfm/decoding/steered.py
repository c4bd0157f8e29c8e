"""Beam search that somebody else steers: which hypotheses live on is decided by more than their probability.

The loop is beam_search's, whose hot path it leaves alone; the choice is that of groups (groups.py) or of required
phrases (required.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from fasttfm.data.tokenizer import BOS
from fasttfm.decoding.hypotheses import Constraints, Hypothesis
from fasttfm.decoding.selection import compute_allowed

if TYPE_CHECKING:
    from fasttfm.models import Transformer


class Live(NamedTuple):
    """The hypotheses of b sentences that live on, K each."""

    scores: Tensor
    """(b, K) log-probability."""
    tokens: Tensor
    """(b, K) their newest token."""
    parents: Tensor
    """(b, K) the row within the sentence that each goes on from."""
    done: list[bool]
    """Of each sentence: whether nothing better can come."""


class Steering(Protocol):
    """Chooses, and keeps what has finished."""

    constraints: Constraints

    def extend(
        self, log_probabilities: Tensor, scores: Tensor, history: Tensor, sentences: list[int], step: int
    ) -> Live:
        """log_probabilities (b * rows, V) of the token after history (b * rows, step), which may be changed; scores
        (b, rows) of the hypotheses; sentences: the b of them that are still searched."""
        ...

    def best(self) -> list[list[Hypothesis]]:
        """What each sentence has finished, best first."""
        ...


def steered_search(
    model: Transformer, source: Tensor, source_lengths: Tensor | None, limits: list[int], steering: Steering
) -> list[list[Hypothesis]]:
    """What steering has finished of every sentence; source, source_lengths and limits as in beam_search."""
    device = source.device
    memory = model.encode(source, source_lengths)
    cache = model.start_cache(memory, source_lengths, rows_per_sentence=1, max_length=max(limits) + 1)
    compute_allowed(cache, steering.constraints.allowed)
    sentences = list(range(len(limits)))
    rows = 1
    tokens = torch.full((len(limits),), BOS, device=device)  # (b * rows,)
    scores = torch.zeros(len(limits), 1, device=device)  # (b, rows)
    history = torch.empty(len(limits), 0, dtype=torch.int64, device=device)  # (b * rows, step)
    for step in range(max(limits) + 1):
        logits = model.step(tokens, cache)
        steering.constraints.exclude(logits, sentences)
        log_probabilities = logits.log_softmax(dim=1)
        live = steering.extend(log_probabilities, scores, history, sentences, step)
        stay = [index for index, is_done in enumerate(live.done) if not is_done]
        if not stay:
            break
        scores, new, parents = live.scores, live.tokens, live.parents
        if len(stay) < len(sentences):
            kept = torch.tensor(stay, device=device)
            cache.keep(kept)
            history = history.unflatten(0, (len(sentences), rows))[kept].flatten(0, 1)
            scores, new, parents = scores[kept], new[kept], parents[kept]
            sentences = [sentences[index] for index in stay]
        continued = (parents + torch.arange(len(sentences), device=device)[:, None] * rows).view(-1)  # (b * K,)
        tokens = new.reshape(-1)
        cache.reorder(continued)
        history = torch.cat([history[continued], tokens[:, None]], dim=1)
        rows = scores.shape[1]
    return steering.best()
