"""One thread that translates the sentences of all clients, as many at once as fit a budget of tokens.

Sentences of one model and one configuration join a running search as soon as others end
(decoding/continuous_batching.py); where that cannot be, what waits is translated batch by batch. First come, first
served: while the sentence that waits longest asks for another model or configuration, nobody joins.

A sentence's translation is the same to the last bit whatever its batch holds (on a CPU), so who else asks at the same
time changes nothing but the time.
"""

import copy
import itertools
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from fasttfm.config.decoding import DecodingConfig
from fasttfm.decoding.continuous_batching import ContinuousBatching, continuous_batching
from fasttfm.decoding.translator import Translation, Translator
from fasttfm.errors import UserError
from fasttfm.serving.metrics import Counts

Answer = Future[list[Translation]]


class QueueFull(Exception):
    """More sentences wait already than are allowed to."""


class Stopping(Exception):
    """The engine takes nothing new."""


@dataclass(eq=False, slots=True)
class Sentence:
    """A sentence and who waits for it."""

    model: str
    config: DecodingConfig
    text: str
    tokens: int
    answer: Answer
    tries: int = 0
    """Times that a Pool has handed it out."""


class Engine:
    """Translates what is submitted, first come first served; sentences of one model and one configuration together."""

    def __init__(
        self, translators: Mapping[str, Translator], counts: Counts, *, queue: int, wait_seconds: float = 0.005
    ) -> None:
        """queue: most sentences that may wait. wait_seconds: how long the first of a batch waits for others."""
        self.translators = translators
        self.counts = counts
        self.queue = queue
        self.wait_seconds = wait_seconds
        self._waiting: deque[Sentence] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="translations", daemon=True)
        self._thread.start()

    def submit(self, model: str, config: DecodingConfig, texts: Sequence[str], tokens: Sequence[int]) -> list[Answer]:
        """What will hold the translations of each text. tokens: source tokens of each. QueueFull, Stopping."""
        new = [Sentence(model, config, text, size, Future()) for text, size in zip(texts, tokens, strict=True)]
        with self._changed:
            if self._stopping:
                raise Stopping
            if len(self._waiting) + len(new) > self.queue:
                raise QueueFull
            self._waiting += new
            self.counts.waiting(len(self._waiting))
            self._changed.notify()
        return [each.answer for each in new]

    def stop(self) -> None:
        """Translate what waits, then end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            alive = _begun(batch)
            if alive:
                self._translate(alive)

    def _who_joins(self, first: Sentence, free_tokens: int) -> list[Sentence]:
        """Those that wait for the same as the first one does, of at most free_tokens source tokens."""
        with self._changed:
            joins: list[Sentence] = []
            while self._waiting and _alike(self._waiting[0], first) and self._waiting[0].tokens <= free_tokens:
                joins.append(self._waiting.popleft())
                free_tokens -= joins[-1].tokens
            if joins:
                self.counts.waiting(len(self._waiting))
        return joins

    def _next_batch(self) -> list[Sentence]:
        """The sentence that waits longest and others for the same model and configuration; none when all is done."""
        with self._changed:
            while not self._waiting:
                if self._stopping:
                    return []
                self._changed.wait()
            first = self._waiting[0]
            budget = self.translators[first.model].config.batch_tokens
            deadline = time.monotonic() + self.wait_seconds
            while not self._stopping and sum(each.tokens for each in self._waiting) < budget:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            batch: list[Sentence] = []
            others: deque[Sentence] = deque()
            for each in self._waiting:
                fits = not batch or budget >= each.tokens
                if _alike(each, first) and fits:
                    batch.append(each)
                    budget -= each.tokens
                else:
                    others.append(each)
            self._waiting = others
            self.counts.waiting(len(others))
        return batch

    def _translate(self, batch: list[Sentence]) -> None:
        translator = copy.copy(self.translators[batch[0].model])
        translator.config = batch[0].config
        with continuous_batching(translator) as running:
            if running is None:
                self._translate_batch(translator, batch)
            else:
                self._translate_running(running, batch)

    def _translate_batch(self, translator: Translator, batch: list[Sentence]) -> None:
        begin = time.perf_counter()
        try:
            results = translator.translate_nbest([each.text for each in batch])
        except BaseException as error:
            for each in batch:
                each.answer.set_exception(error)
            return
        self._count(begin, len(batch), batch)
        for each, translations in zip(batch, results, strict=True):
            each.answer.set_result(translations)

    def _translate_running(self, running: ContinuousBatching, first: list[Sentence]) -> None:
        """Translates these and all that join them, until nobody does."""
        searched: dict[Hashable, Sentence] = {}
        numbers = itertools.count()
        new = first
        try:
            while new or searched:
                for each in new:
                    number = next(numbers)
                    searched[number] = each
                    running.add(number, each.text)
                begin = time.perf_counter()
                together = len(searched)
                ended = [(searched.pop(number), result) for number, result in running.step()]
                self._count(begin, together, [each for each, _ in ended])
                for each, result in ended:
                    if isinstance(result, UserError):
                        each.answer.set_exception(result)
                    else:
                        each.answer.set_result(result)
                new = _begun(self._who_joins(first[0], running.free_tokens))
        except BaseException as error:
            for each in (*searched.values(), *new):
                if not each.answer.done():
                    each.answer.set_exception(error)

    def _count(self, begin: float, together: int, ended: list[Sentence]) -> None:
        self.counts.step(time.perf_counter() - begin, together, len(ended), sum(each.tokens for each in ended))


def _alike(one: Sentence, other: Sentence) -> bool:
    return (one.model, one.config) == (other.model, other.config)


def _begun(batch: list[Sentence]) -> list[Sentence]:
    """Those that nobody has cancelled; from here on nobody can."""
    return [each for each in batch if each.answer.set_running_or_notify_cancel()]
