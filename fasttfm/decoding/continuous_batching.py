"""Lines that join a running search: what a server translates for clients who come at any time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from fasttfm.decoding.batches import inference
from fasttfm.decoding.continuous import RunningSearch, Waiting, can_continue
from fasttfm.decoding.hypotheses import NOT_A_NUMBER
from fasttfm.decoding.translator import Translation, Translator
from fasttfm.errors import UserError

Result = tuple[Hashable, list[Translation] | UserError]
"""What a line was added with, and its translations, or why it has none."""


class ContinuousBatching:
    """Translates lines that are added between its steps, each as Translator.translate_nbest does."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        self.search = RunningSearch(translator.model, translator.config, banned=translator.banned)
        self._empty: list[Hashable] = []

    @property
    def searched(self) -> int:
        """Lines that are being translated."""
        return self.search.searched

    @property
    def free_tokens(self) -> int:
        """Source tokens of the budget that no line has taken, those that wait to be searched counted."""
        return self.search.free - sum(each.tokens for each in self.search.waiting)

    def add(self, key: Hashable, line: str) -> None:
        """A line, which joins at one of the next steps; key: what its translations come back with."""
        source = self.translator.encode_lines([line]).get(0)
        if source is None:
            self._empty.append(key)
            return
        shortlist = self.translator.shortlist
        allowed = None if shortlist is None else shortlist.tokens(source)
        prefix = self.translator.target_tokenizer.prefix
        self.search.waiting.append(Waiting(key, source, prefix, allowed=allowed))

    def step(self) -> list[Result]:
        """Takes a step, and gives the lines that have ended with it."""
        results: list[Result] = [(key, [Translation("", 0.0, 0.0)]) for key in self._empty]
        self._empty = []
        for key, hypotheses in self.search.step():
            if not hypotheses or math.isnan(hypotheses[0].log_probability):
                results.append((key, UserError(NOT_A_NUMBER)))
            else:
                results.append((key, self.translator.translations(hypotheses)))
        return results


@contextmanager
def continuous_batching(translator: object) -> Iterator[ContinuousBatching | None]:
    """What lines can be added to inside the block; None where the model or the configuration takes whole batches only:
    away from a CPU, without numba, and for sampling, diverse beams, coverage, alignments and terminology."""
    if not isinstance(translator, Translator):
        yield None
        return
    config = translator.config
    whole = config.sampling or config.mbr_samples or config.coverage_penalty
    if whole or translator.terminology is not None or translator.aligned is not None:
        yield None
        return
    with inference(translator.model, batch_invariant=config.batch_invariant):
        yield ContinuousBatching(translator) if can_continue(translator.model, config) else None
