"""Token constraints of a search on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm.search.tasks import Task


class Constraints:
    """Sets log-probabilities of disallowed tokens to -inf.

    Allowed tokens keep the model's values, so a forced token (end-of-sentence at the limit, a prefix) costs its own
    log-probability.
    """

    def __init__(self, config: DecodingConfig, device: torch.device, banned: Sequence[Sequence[int]] = ()) -> None:
        """banned: token sequences that no output contains unless a prefix forces them."""
        self.min_len = config.min_len
        self.ngram = config.no_repeat_ngram
        never = [PAD, BOS] if config.allow_unk else [PAD, UNK, BOS]
        self.never = torch.tensor(never + [each[0] for each in banned if len(each) == 1], device=device)
        self.endings: dict[tuple[int, ...], list[int]] = {}
        """Prefix of a banned sequence -> tokens that would complete it."""
        for each in banned:
            if len(each) > 1:
                self.endings.setdefault(tuple(each[:-1]), []).append(each[-1])
        self.lengths = sorted({len(beginning) for beginning in self.endings})

    def exclude(self, logits: Tensor, tasks: Sequence[Task]) -> None:
        """Set logits (len(tasks) * rows, V) of tokens outside the tasks' lists to -inf, in place.

        Called before the softmax, so the allowed tokens share the whole probability. Either all tasks have a list of
        allowed tokens or none.
        """
        if tasks[0].allowed is None:
            return
        excluded = torch.stack([task.excluded(logits.shape[1], logits.device) for task in tasks])
        by_sentence = logits.view(len(tasks), -1, logits.shape[1])
        by_sentence.masked_fill_(excluded[:, None], -torch.inf)

    def apply(self, log_probabilities: Tensor, history: Tensor, tasks: Sequence[Task]) -> None:
        """Mask log_probabilities (len(tasks) * rows, V) of the next token, in place.

        history (., W): tokens of each row without begin-of-sentence; the first task.written are valid.
        """
        by_sentence = log_probabilities.view(len(tasks), -1, log_probabilities.shape[1])
        forced = []  # read before masking: a prefix may contain a token that is otherwise disallowed
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
        """Mask tokens that would complete a repeated n-gram or a banned sequence."""
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
