"""Beam search over a batch of sentences.

Each step extends the K live hypotheses of a sentence by one token, keeps the K best that go on and files those that
end. Log-probabilities only fall, and no length penalty divides by more than that of the longest output allowed; so a
sentence is done as soon as its best live log-probability, divided by that, is no better than its finished hypotheses.
It then leaves the batch with its caches. The first step runs one row a sentence: K equal rows would do the same work.
Rows are sentence * K + k throughout. Source: Wu et al. 2016, section 7; Vaswani et al. 2017, section 6.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.decoding.hypotheses import Constraints, Hypothesis, length_penalty
from fasttfm.decoding.largest import largest

if TYPE_CHECKING:
    from fasttfm.models import Transformer


def beam_search(
    model: Transformer,
    source: Tensor,
    source_lengths: Tensor | None,
    limits: list[int],
    constraints: Constraints,
    config: DecodingConfig,
) -> list[list[Hypothesis]]:
    """The config.nbest best finished hypotheses of every sentence, best first.

    source (B, S) int64 and source_lengths (B,) int64, None without padding, on the model's device; limits: longest
    output of each sentence.
    """
    device, beam = source.device, config.beam
    memory = model.encode(source, source_lengths)
    cache = model.start_cache(memory, source_lengths, rows_per_sentence=1, max_length=max(limits) + 1)
    finished = [Finished(config.nbest) for _ in limits]

    # All of these hold the sentences still in the batch, b of them, with `rows` hypotheses each (1 at first, then K).
    sentences = list(range(len(limits)))
    rows = 1
    tokens = torch.full((len(limits),), BOS, device=device)  # (b * rows,) the newest token of each hypothesis
    scores = torch.zeros(len(limits), 1, device=device)  # (b, rows) log-probability
    history = torch.empty(len(limits), 0, dtype=torch.int64, device=device)  # (b * rows, step)
    worst = torch.full((len(limits),), -torch.inf, device=device)  # (b,) score that a new hypothesis has to beat
    # (b,) largest divisor that a hypothesis of the sentence can still get
    last_penalty = torch.tensor([length_penalty(limit + 1, config) for limit in limits], device=device)

    for step in range(max(limits) + 1):
        logits = model.step(tokens, cache)  # (b * rows, V) float32
        best, best_tokens, parents = _candidates(logits, scores, constraints, history, sentences, beam)  # (b, 2K) each

        ends = best_tokens == EOS
        penalised = best / length_penalty(step + 1, config)
        news = ends & (penalised > worst[:, None])
        if news.any():
            _file(news, penalised, best, parents, history, sentences, finished)
            worst = torch.tensor([finished[sentence].worst for sentence in sentences], device=device)

        scores, chosen = best.masked_fill_(ends, -torch.inf).topk(beam)  # (b, K)
        done = (scores[:, 0] / last_penalty <= worst).tolist()
        parents = parents.gather(1, chosen)
        if not getattr(cache, "moves_nothing", False):
            order = _stay_in_place(parents)
            scores, parents, chosen = (part.gather(1, order) for part in (scores, parents, chosen))
        tokens = best_tokens.gather(1, chosen)
        if any(done):
            stay = [place for place, is_done in enumerate(done) if not is_done]
            if not stay:
                break
            sentences = [sentences[place] for place in stay]
            kept = torch.tensor(stay, device=device)
            cache.keep(kept)
            history = history.unflatten(0, (len(done), rows))[kept].flatten(0, 1)
            scores, tokens, parents, worst, last_penalty = (
                part[kept] for part in (scores, tokens, parents, worst, last_penalty)
            )
        continued = (parents + torch.arange(len(sentences), device=device)[:, None] * rows).view(-1)  # (b * K,)
        tokens = tokens.reshape(-1)
        cache.reorder(continued)
        history = torch.cat([history[continued], tokens[:, None]], dim=1)
        rows = beam
    return [hypotheses.best_first() for hypotheses in finished]


def _stay_in_place(parents: Tensor) -> Tensor:
    """An order (b, K) of the K live hypotheses that puts as many as possible into the row of their parent (b, K).

    Those rows' caches need not move. The first child of a parent takes its row, the others rows of childless parents.
    """
    count, beam = parents.shape
    same = parents[:, :, None] == parents[:, None, :]
    first = ~same.tril(-1).any(dim=2)  # (b, K) no earlier hypothesis has this parent
    childless = torch.ones(count, beam, dtype=torch.bool, device=parents.device).scatter_(1, parents, False)
    # Stable sorts bring the further children, and the childless rows, to the front in their order.
    further, free = first.long().argsort(dim=1, stable=True), (~childless).long().argsort(dim=1, stable=True)
    rows = parents.scatter(1, further, free)
    rows = torch.where(first, parents, rows)
    return rows.argsort(dim=1)


def _candidates(
    logits: Tensor, scores: Tensor, constraints: Constraints, history: Tensor, sentences: list[int], beam: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The 2K best extensions of each sentence's hypotheses, best first: log-probability, token, row within sentence.

    At most K of 2K extensions end, so at least K go on. The 2K best of a sentence are among the 2K best of its rows, so
    nothing as large as K vocabularies is sorted.
    """
    sentence_count, rows = scores.shape
    log_probabilities = logits.log_softmax(dim=1)
    constraints.apply(log_probabilities, history, sentences)
    width = min(2 * beam, logits.shape[1])
    values, ids = largest(log_probabilities, width)  # (b * rows, width)
    totals = (values + scores.view(-1, 1)).view(sentence_count, rows * width)
    if totals.shape[1] < 2 * beam:  # a vocabulary smaller than the beam
        missing = (0, 2 * beam - totals.shape[1])
        totals, ids = pad(totals, missing, value=-torch.inf), pad(ids.view(sentence_count, -1), missing)
    best, slots = totals.topk(2 * beam)  # (b, 2K)
    best_tokens = ids.view(sentence_count, -1).gather(1, slots)
    return best, best_tokens, (slots // width).clamp_(max=rows - 1)


def _file(
    news: Tensor,
    penalised: Tensor,
    best: Tensor,
    parents: Tensor,
    history: Tensor,
    sentences: list[int],
    finished: list[Finished],
) -> None:
    """Add the extensions marked in news (b, 2K) to their sentences' finished hypotheses; history (b * rows, step)."""
    place, _ = news.nonzero(as_tuple=True)
    outputs = history[place * (len(history) // len(sentences)) + parents[news]].tolist()
    for row, score, log_probability, output in zip(
        place.tolist(), penalised[news].tolist(), best[news].tolist(), outputs
    ):
        finished[sentences[row]].add(Hypothesis(output, score, log_probability))


class Finished:
    """The best finished hypotheses of one sentence."""

    def __init__(self, size: int):
        self.size = size
        self.hypotheses: list[Hypothesis] = []

    @property
    def worst(self) -> float:
        """The score that a hypothesis must beat to get in."""
        return self.hypotheses[-1].score if len(self.hypotheses) == self.size else float("-inf")

    def add(self, hypothesis: Hypothesis) -> None:
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda each: -each.score)  # stable: of equal ones, the first found stays first
        del self.hypotheses[self.size :]

    def best_first(self) -> list[Hypothesis]:
        return self.hypotheses
