"""A model whose next-token distributions come from a table, exhaustive search, and beam search in plain Python."""

from __future__ import annotations

import functools
import itertools
import random

import torch
from torch import Tensor, nn

from fasttfm.models import TransformerConfig
from fasttfm.search import DecodingConfig

BOS, EOS = 2, 3


@functools.lru_cache(1 << 16)
def _drawn(source: int, target: tuple[int, ...], spread: float, count: int) -> tuple[float, ...]:
    draw = random.Random(f"{source} {target}")
    return tuple(draw.gauss(0, spread) for _ in range(count))


class TableModel(nn.Module):
    """Logits are a fixed function of the source's first token and the target so far; no two are equal."""

    def __init__(self, vocab_size: int, spread: float = 2.0, end: float = 0.0):
        """end: added to the logit of end-of-sentence; large values make short outputs."""
        super().__init__()
        self.vocab_size, self.spread, self.end = vocab_size, spread, end
        self.config = TransformerConfig(vocab_size=vocab_size, d_model=8, heads=2)
        self.where = nn.Parameter(torch.zeros(()))
        self.read: list[list[int]] = []  # the newest tokens of every step's rows

    @property
    def rows_computed(self) -> list[int]:
        """Rows of each step."""
        return [*map(len, self.read)]

    def logits(self, source: int, target: tuple[int, ...]) -> list[float]:
        values = list(_drawn(source, target, self.spread, self.vocab_size))
        values[EOS] += self.end
        return values

    def forward(self, source: Tensor, target: Tensor, source_lengths=None, target_lengths=None) -> Tensor:
        return torch.tensor(
            [
                [self.logits(first, tuple(tokens[1 : position + 1])) for position in range(len(tokens))]
                for first, tokens in zip(source[:, 0].tolist(), target.tolist())
            ]
        )

    def encode(self, source: Tensor, source_lengths: Tensor) -> Tensor:
        return source

    def start_cache(self, memory, source_lengths, *, rows_per_sentence, beam, max_length) -> TableCache:
        return TableCache(memory[:, 0].tolist(), rows_per_sentence, max_length)

    def step(self, tokens: Tensor, cache: TableCache) -> Tensor:
        self.read.append(tokens.tolist())
        cache.advance(self.read[-1])
        return torch.tensor([self.logits(source, target[1:]) for source, target in cache.rows()])

    def log_probability(self, source: int, target: tuple[int, ...]) -> float:
        """log P(target, end-of-sentence | source)."""
        total = 0.0
        for position, token in enumerate((*target, EOS)):
            logits = torch.tensor(self.logits(source, target[:position]), dtype=torch.float64)
            total += logits.log_softmax(0)[token].item()
        return total


class Tied(TableModel):
    """One likely token and many ties: log-probabilities are multiples of 128, whose sums are exact."""

    likely = 0.0

    def logits(self, source: int, target: tuple[int, ...]) -> list[float]:
        draw = random.Random(f"{source} {target}")
        values = draw.choices([-128.0, -256.0, -384.0, -512.0], k=self.vocab_size)
        values[draw.randrange(EOS, self.vocab_size)] = self.likely
        return values


class Diverged(TableModel):
    def logits(self, source: int, target: tuple[int, ...]) -> list[float]:
        return [float("nan")] * self.vocab_size


class TableCache:
    def __init__(self, sources: list[int], rows_per_sentence: int, max_length: int):
        self.sources, self.max_length = sources, max_length
        self.targets: list[tuple[int, ...]] = [()] * (len(sources) * rows_per_sentence)

    def rows(self):
        per_sentence = len(self.targets) // len(self.sources)
        return [(self.sources[row // per_sentence], target) for row, target in enumerate(self.targets)]

    def advance(self, tokens: list[int]) -> None:
        assert len(tokens) == len(self.targets), "one token for each row"
        self.targets = [(*target, token) for target, token in zip(self.targets, tokens)]
        assert len(self.targets[0]) <= self.max_length, "the search ran past the length it asked for"

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        old, new = self.rows(), ranks.tolist()
        per_old = len(old) // len(self.sources)
        places = [row // per_old for row in rows.tolist()]  # of their sentences
        per_sentence = max(new, default=0) + 1
        assert new == [*range(per_sentence)] * (len(new) // per_sentence), "as many rows for each sentence"
        first = places[::per_sentence]
        assert places == [place for place in first for _ in range(per_sentence)], "a row may only continue its sentence"
        assert first == sorted(set(first))
        self.targets = [old[row][1] for row in rows.tolist()]
        self.sources = [self.sources[place] for place in first]


def config(**changes) -> DecodingConfig:
    """A beam of 4, outputs of at most 6 tokens, GNMT's length penalty."""
    defaults = {"beam": 4, "max_len_a": 0.0, "max_len_b": 6, "min_len": 0, "early_stopping": False}
    return DecodingConfig(**{**defaults, "length_penalty": "wu", "alpha": 0.6, **changes})


def penalty(length: int, config: DecodingConfig) -> float:
    """Length penalties as published; length includes end-of-sentence."""
    formulas = {"wu": ((5 + length) / 6) ** config.alpha, "power": length**config.alpha, "avg": length, "none": 1}
    return formulas[config.length_penalty]


def exhaustive(model: TableModel, source: int, longest: int, config: DecodingConfig) -> list[tuple[float, list[int]]]:
    """Every output of at most `longest` tokens with its score, best first."""
    words = [token for token in range(model.vocab_size) if token > EOS]
    results = []
    for length in range(config.min_len, longest + 1):
        for target in itertools.product(words, repeat=length):
            score = model.log_probability(source, target) / penalty(length + 1, config)
            results.append((score, list(target)))
    return sorted(results, reverse=True)


def by_hand(model: TableModel, source: int, longest: int, settings: DecodingConfig) -> list[tuple[float, list[int]]]:
    """The nbest outputs of a beam search with their scores, best first. Without early_stopping it runs to the longest
    output. Sorts are stable: of equal ones the better hypothesis comes first, then the lower token."""
    size = settings.beam // settings.diverse_beam_groups
    live = [[(0.0, 0.0, ())] for _ in range(settings.diverse_beam_groups)]  # (ranked by, log-probability, output)
    finished = [[] for _ in live]
    ends = 0
    for step in range(longest + 1):
        taken = [0] * model.vocab_size
        for group, hypotheses in enumerate(live):
            candidates = []
            for rank, total, target in hypotheses:
                logits = torch.tensor(model.logits(source, target), dtype=torch.float64).log_softmax(0).tolist()
                for token in range(EOS, model.vocab_size) if step < longest else [EOS]:
                    lost = settings.diverse_beam_strength * taken[token]
                    candidates.append((rank + logits[token] - lost, total + logits[token], (*target, token)))
            best = sorted(candidates, key=lambda each: -each[0])[: 2 * size]
            finished[group] += [
                (total / penalty(step + 1, settings), out[:-1]) for _, total, out in best if out[-1] == EOS
            ]
            ends += sum(output[-1] == EOS for _, _, output in best[:size])
            live[group] = [each for each in best if each[2][-1] != EOS][:size]
            for _, _, output in live[group]:
                taken[output[-1]] += 1
        if settings.early_stopping and ends >= settings.beam:
            break
    best = {output: score for group in finished for score, output in sorted(group, key=lambda each: -each[0])[:size]}
    ranked = sorted(best, key=lambda output: -best[output])[: settings.nbest]
    return [(best[output], list(output)) for output in ranked]
