"""Choosing the extensions of a step, in PyTorch operations of fixed shape that never read a value on the host.

For plain beam search kernels do the same in three launches (kernels/search.py); this is their reference, and the only
implementation of sampling and diverse beam search. Ties: the better score, then the lower row, then the lower token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm.models.step_layers import remember_places
from fasttfm.search.beam import best_extensions
from fasttfm.search.device.state import State
from fasttfm.search.diverse import extend_groups
from fasttfm.search.greedy import draw_tokens
from fasttfm.search.top_k import sorted_top_k


class Rules:
    """Token constraints that are shared by all sentences."""

    def __init__(self, state: State, config: DecodingConfig, banned: Sequence[Sequence[int]], *, selects: bool) -> None:
        """banned: token sequences that no output contains. selects: every sentence has its own list of tokens."""
        vocabulary, device = state.sizes.vocabulary, state.device
        never = [PAD, BOS, *([] if config.allow_unk else [UNK]), *(each[0] for each in banned if len(each) == 1)]
        self.never = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        """(V,) bool: tokens that no sentence may contain."""
        self.never[torch.tensor(never, device=device)] = True
        self.ngram = config.no_repeat_ngram
        """Size of n-grams that may occur only once; 0: no limit."""
        longer = [each for each in banned if len(each) > 1]
        width = max((len(each) for each in longer), default=1) - 1
        beginnings = [[_ANY] * (width + 1 - len(each)) + list(each[:-1]) for each in longer]
        self.beginnings = torch.tensor(beginnings, dtype=torch.int64, device=device).view(len(longer), width)
        """(M, W): banned sequences without their last token, left-padded with _ANY."""
        self.endings = torch.tensor([each[-1] for each in longer], dtype=torch.int64, device=device)
        self.selected: Tensor | None = None
        """(Q + 1, V) bool: allowed tokens by place, over which probability is renormalized; None: all."""
        if selects:
            self.selected = torch.ones(state.sizes.places + 1, vocabulary, dtype=torch.bool, device=device)
        self.by_history = bool(self.ngram or longer)
        """Whether allowed tokens depend on the output so far."""

    def completions(self, state: State) -> Tensor:
        """(S, K, V) bool: tokens that would complete a repeated n-gram or a banned sequence."""
        slots, beam, _, steps, *_, vocabulary = state.sizes
        written, position = history(state), state.position[:, None, None]
        refused = torch.zeros(slots, beam, vocabulary + 1, dtype=torch.bool, device=state.device)  # last column: unused
        if 0 < self.ngram <= steps:
            before = self.ngram - 1
            count = steps - before
            repeats = torch.arange(count, device=state.device) + before < position
            for place in range(before):
                newest = written.gather(2, (position - before + place).clamp(min=0).expand(slots, beam, 1))
                repeats = repeats & (written[..., place : place + count] == newest)
            refused.scatter_(2, torch.where(repeats, written[..., before:], vocabulary), True)
        if len(self.endings):
            width = self.beginnings.shape[1]
            places = position - width + torch.arange(width, device=state.device)
            newest = written.gather(2, places.clamp(min=0).expand(slots, beam, width)).masked_fill(
                places < 0, _NO_TOKEN
            )
            begun = ((newest[:, :, None] == self.beginnings) | (self.beginnings == _ANY)).all(dim=3)
            refused.scatter_(2, torch.where(begun, self.endings, vocabulary), True)
        return refused[..., :vocabulary]


_ANY, _NO_TOKEN = -2, -3


def history(state: State) -> Tensor:
    """Tokens of each row (S, K, T), _NO_TOKEN after its end."""
    slots, beam, _, steps, *_ = state.sizes
    places = torch.arange(steps, device=state.device)
    past = state.ancestors.view(slots, beam, steps).roll(-1, dims=2) // steps % beam  # a token is read one step later
    written = state.tokens.index_select(0, state.sentence)[:, None].expand(slots, beam, steps, beam)
    written = written.gather(3, past[..., None])[..., 0]
    position = state.position[:, None, None]
    written = torch.where(places == position - 1, state.newest[:, :, None], written)
    return written.masked_fill(places >= position, _NO_TOKEN)


def admit(state: State) -> None:
    """Move sentences from the queue into free slots."""
    free = state.sentence == state.sizes.places
    following = state.head + free.cumsum(0) - 1
    takes = free & (following < state.tail)
    place = state.queue.index_select(0, following.remainder(state.sizes.places))
    state.sentence.copy_(torch.where(takes, place, state.sentence))
    state.head += takes.sum()
    state.position.masked_fill_(takes, 0)
    state.ended.masked_fill_(takes, 0)
    state.newest.masked_fill_(takes[:, None], BOS)
    state.scores.copy_(torch.where(takes[:, None], state.first_scores, state.scores))
    state.source_lengths.copy_(state.setting("source"))


def log_probabilities(state: State, logits: Tensor, rules: Rules) -> Tensor:
    """Masked log-probabilities (S, K, V) float32 of logits (R, V). A forced token keeps its own."""
    slots, beam, *_, vocabulary = state.sizes
    logits = logits.float()
    if rules.selected is not None:
        selected = rules.selected.index_select(0, state.sentence)[:, None].expand(slots, beam, vocabulary)
        logits = logits.masked_fill(~selected.reshape(logits.shape), -torch.inf)
    values = logits.log_softmax(dim=1).view(slots, beam, vocabulary)
    tokens = torch.arange(vocabulary, device=state.device)
    position = state.position[:, None]
    forced = state.forced.index_select(0, state.sentence).gather(1, position)  # (S, 1)
    refused = rules.never | ((tokens == EOS) & (position < state.setting("least")[:, None]))
    if rules.by_history:
        refused = refused[:, None] | rules.completions(state)
        return values.masked_fill(
            torch.where((forced >= 0)[..., None], (tokens != forced)[:, None], refused), -torch.inf
        )
    return values.masked_fill(torch.where(forced >= 0, tokens != forced, refused)[:, None], -torch.inf)


def choose_beams(state: State, values: Tensor) -> None:
    """Extend the rows of each slot by log-probabilities (S, K, V), and file the hypotheses that end."""
    slots, beam, vocabulary = values.shape
    top = sorted_top_k(values.flatten(0, 1), min(2 * beam, vocabulary))
    values, tokens = (part.view(slots, beam, -1) for part in top)  # (S, K, W)
    values = values.masked_fill(values.isnan(), -torch.inf)
    best, tokens, parents = best_extensions(values, tokens, state.scores, 2 * beam, sorted_top_k)  # (S, 2K)

    ranks = torch.arange(2 * beam, device=state.device)
    ends = (tokens == EOS) & (best > -torch.inf)
    scores = best / _divisors(state, state.position)
    _file(state, scores.masked_fill(~(ends & (ranks < state.setting("ranks")[:, None])), -torch.inf), best, parents)
    used = state.setting("beam")[:, None]
    state.ended += (ends & (ranks < used)).sum(dim=1)

    live, chosen = best.masked_fill(tokens == EOS, -torch.inf).sort(dim=1, descending=True, stable=True)
    live, chosen = live[:, :beam].masked_fill(ranks[:beam] >= used, -torch.inf), chosen[:, :beam]
    worst = state.found_scores.index_select(0, state.sentence).gather(1, state.setting("nbest")[:, None] - 1)
    done = (live[:, :1] / _divisors(state, state.setting("limit")) <= worst)[:, 0] | _ends_anyway(state)
    go_on(state, live, tokens.gather(1, chosen), parents.gather(1, chosen), done)


class Groups:
    """Diverse beam search (search/diverse.py), with a list of finished hypotheses per group."""

    def __init__(self, state: State, config: DecodingConfig) -> None:
        """state: keeps as many hypotheses as it has rows."""
        self.config, self.size = config, config.beam // config.diverse_beam_groups
        self.punished = torch.zeros_like(state.scores)
        """(S, K): accumulated penalty of each live hypothesis."""
        state.first_scores[:: self.size] = 0.0

    def choose(self, state: State, values: Tensor) -> None:
        """Extend the groups one after the other by log-probabilities (S, K, V)."""
        self.punished.masked_fill_((state.position == 0)[:, None], 0.0)
        finished = torch.ones_like(state.position, dtype=torch.bool)
        divisors, last = _divisors(state, state.position), _divisors(state, state.setting("limit"))[:, 0]

        def file(group: int, ends: Tensor, best: Tensor, parents: Tensor, live: Tensor) -> None:
            nonlocal finished
            columns = slice(group * self.size, (group + 1) * self.size)
            _file(state, (best / divisors).masked_fill(~ends, -torch.inf), best, parents, columns)
            state.ended += ends[:, : self.size].sum(dim=1)
            worst = state.found_scores[:, columns.stop - 1].index_select(0, state.sentence)
            finished = finished & (live.amax(dim=1) / last <= worst)

        values = values.masked_fill(values.isnan(), -torch.inf)
        best, tokens, parents, punished = extend_groups(
            values, state.scores, self.punished, self.config, sorted_top_k, file
        )
        self.punished.copy_(punished)
        go_on(state, best, tokens, parents, finished | _ends_anyway(state))


class Draws:
    """Sampling: every row is an independent sample; the n-th finished hypothesis belongs to the n-th row."""

    def __init__(self, state: State, config: DecodingConfig) -> None:
        """state: keeps as many hypotheses as it has rows."""
        slots, beam, _, steps, _, places, _ = state.sizes
        self.config = config
        self.uniform = torch.zeros(places + 1, steps, beam, dtype=torch.float32, device=state.device)
        """(Q + 1, T, K): uniform random numbers in [0, 1) by place."""
        self._rows = torch.arange(beam, device=state.device).expand(slots, beam)
        state.first_scores.zero_()

    def choose(self, state: State, values: Tensor) -> None:
        """Sample from log-probabilities (S, K, V)."""
        slots, beam, vocabulary = values.shape
        at = state.sentence * state.sizes.steps + state.position
        uniform = self.uniform.view(-1, beam).index_select(0, at).view(-1)
        tokens = draw_tokens(values.view(-1, vocabulary), uniform, self.config, sorted_top_k).view(slots, beam)
        drawn = values.gather(2, tokens[..., None])[..., 0]
        ends = state.found_ends.index_select(0, state.sentence)
        live = ends < 0
        scores = torch.where(live, state.scores + drawn, state.scores)
        ended = live & (tokens == EOS)
        new = scores / _divisors(state, state.position), scores, state.position[:, None] * beam + self._rows
        for kept, values in zip(state.found, new):
            kept.index_copy_(0, state.sentence, torch.where(ended, values, kept.index_select(0, state.sentence)))
        done = ~(live & ~ended).any(dim=1) | _ends_anyway(state)
        go_on(state, scores, tokens, self._rows, done)


def go_on(state: State, scores: Tensor, tokens: Tensor, parents: Tensor, done: Tensor) -> None:
    """Store the step's rows, (S, K) each; slots that are done, (S,) bool, release their sentences."""
    slots, beam, _, steps, *_ = state.sizes
    at = state.sentence * steps + state.position
    state.tokens.view(-1, beam).index_copy_(0, at, tokens)
    state.parents.view(-1, beam).index_copy_(0, at, parents)
    state.newest.copy_(tokens)
    state.scores.copy_(scores)
    remember_places(state)
    table = state.ancestors.view(slots, beam, steps)
    table.copy_(table.gather(1, parents[:, :, None].expand(table.shape)))
    ended = state.finished.index_select(0, state.sentence)
    state.finished.index_copy_(0, state.sentence, torch.where(done, state.setting("number"), ended))
    state.sentence.masked_fill_(done, state.sizes.places)
    state.position.add_(1).masked_fill_(done, 0)


def _divisors(state: State, positions: Tensor) -> Tensor:
    """Length penalty (S, 1) of outputs that end at positions (S,)."""
    return state.divisors.index_select(0, state.sentence).gather(1, positions[:, None])


def _ends_anyway(state: State) -> Tensor:
    """(S,) bool: slots with enough hypotheses, or at their length limit."""
    return (state.ended >= state.setting("enough")) | (state.position == state.setting("limit"))


def _file(
    state: State, scores: Tensor, log_probabilities: Tensor, parents: Tensor, columns: slice = slice(None)
) -> None:
    """Merge hypotheses (S, C), scores -inf where there is none, into the finished ones; of equal ones the older stays
    first.

    columns: of the lists that they are merged into.
    """
    ends = state.position[:, None] * state.sizes.beam + parents
    kept = [each[:, columns].index_select(0, state.sentence) for each in state.found]
    joined = [torch.cat([old, new], dim=1) for old, new in zip(kept, (scores, log_probabilities, ends))]
    order = joined[0].sort(dim=1, descending=True, stable=True).indices[:, : kept[0].shape[1]]
    for whole, part in zip(state.found, joined):
        whole[:, columns].index_copy_(0, state.sentence, part.gather(1, order))
