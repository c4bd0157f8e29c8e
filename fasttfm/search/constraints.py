"""Constraints of a search on the host: the tokens that may follow at a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm.search.tasks import Task


class Constraints:
    """Sets the log-probabilities of tokens that may not follow to -inf.

    The others keep the model's own, so that a forced token (end-of-sentence at the limit, a prefix) is paid for.
    """

    def __init__(self, config: DecodingConfig, device: torch.device, banned: Sequence[Sequence[int]] = ()) -> None:
        """banned: sequences of tokens that no output holds, unless a prefix forces them."""
        self.min_len = config.min_len
        self.ngram = config.no_repeat_ngram
        never = [PAD, BOS] if config.allow_unk else [PAD, UNK, BOS]
        self.never = torch.tensor(never + [each[0] for each in banned if len(each) == 1], device=device)
        self.endings: dict[tuple[int, ...], list[int]] = {}
        """Beginning of a banned sequence -> the tokens that would complete one."""
        for each in banned:
            if len(each) > 1:
                self.endings.setdefault(tuple(each[:-1]), []).append(each[-1])
        self.lengths = sorted({len(beginning) for beginning in self.endings})

    def exclude(self, logits: Tensor, tasks: Sequence[Task]) -> None:
        """Set logits (len(tasks) * rows of each, V) of tokens that are not allowed to -inf, in place.

        Before probabilities are computed, which those that are allowed then share. Of some tasks all or none have a
        list of allowed tokens.
        """
        if tasks[0].allowed is None:
            return
        excluded = torch.stack([task.excluded(logits.shape[1], logits.device) for task in tasks])
        by_sentence = logits.view(len(tasks), -1, logits.shape[1])
        by_sentence.masked_fill_(excluded[:, None], -torch.inf)

    def apply(self, log_probabilities: Tensor, history: Tensor, tasks: Sequence[Task]) -> None:
        """Change log_probabilities (len(tasks) * rows of each, V) of the token that follows, in place.

        history (., W): tokens of each row without begin-of-sentence, of which task.written count.
        """
        by_sentence = log_probabilities.view(len(tasks), -1, log_probabilities.shape[1])
        forced = []  # read before anything is masked: a prefix may hold a token that a search would not produce
        for index, task in enumerate(tasks):
            token = _forced_token(task)
            if token is not None:
                forced.append((index, token, by_sentence[index, :, token].clone()))
        log_probabilities.index_fill_(1, self.never, -torch.inf)
        if short := [index for index, task in enumerate(tasks) if task.written < self.min_len]:
            by_sentence[short, :, EOS] = -torch.inf
        if self.ngram or self.endings:
            rows = by_sentence.shape[1]
            outputs = [row[: tasks[number // rows].written] for number, row in enumerate(history.tolist())]
            self._mask_completions(log_probabilities, outputs)
        for index, token, value in forced:
            by_sentence[index] = -torch.inf
            by_sentence[index, :, token] = value

    def _mask_completions(self, log_probabilities: Tensor, history: list[list[int]]) -> None:
        """Tokens that would complete a repeated n-gram or a banned sequence."""
        rows: list[int] = []
        tokens: list[int] = []
        for row, written in enumerate(history):
            completions = {
                token
                for length in self.lengths
                if length <= len(written)
                for token in self.endings.get(tuple(written[-length:]), ())
            }
            if self.ngram and len(written) >= self.ngram:
                before = self.ngram - 1
                newest = written[len(written) - before :]
                completions |= {
                    written[index + before]
                    for index in range(len(written) - before)
                    if written[index : index + before] == newest
                }
            rows += [row] * len(completions)
            tokens += completions
        if rows:
            log_probabilities[rows, tokens] = -torch.inf


def _forced_token(task: Task) -> int | None:
    if task.written >= task.limit:
        return EOS
    if task.written < len(task.waiting.prefix):
        return task.waiting.prefix[task.written]
    return None
