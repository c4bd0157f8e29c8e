"""Engines in processes of their own, one a core, with one queue and one copy of the weights between them.

The server's process reads requests and hands sentences out, taken in turns from the requests (queue.py), to the worker
with the fewest source tokens in hand. A worker searches what it has as the engine of a single process does (engine.py),
and as a sentence does not depend on the others, who translates it changes nothing.

A worker that is killed is replaced by another, and its sentences are given to others; where the workers' first process
is killed, or workers keep ending, the server ends and says so.
"""

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fasttfm.errors import UserError
from fasttfm.search.search import prepare
from fasttfm.system.processes import Worker, WorkerPool
from fasttfm.translate.server.engine import Engine, QueueFull, Stopping, settle
from fasttfm.translate.server.metrics import Metrics
from fasttfm.translate.server.queue import Answer, FairQueue, Sentence
from fasttfm.translate.translator import Translator

_MOST_TRIES = 2
"""Workers that may end while they have a sentence, before it is given up."""
_MOST_ENDED = 10
"""Workers that may end one after the other without an answer in between, before the server does."""


class Pool(WorkerPool):
    """Translates what is submitted, as Engine does, by several processes."""

    def __init__(self, translators: Mapping[str, Translator], metrics: Metrics, *, queue: int, workers: int) -> None:
        """translators: on a CPU; they are not needed here any more afterwards. queue: most sentences that may wait.
        UserError where the processes cannot begin."""
        remedy = "start the server again, with fewer --workers or a smaller --max-tokens if memory did not suffice"
        super().__init__((dict(translators), workers), workers, remedy=remedy, prepare=_prepare, begin=_Searching)
        self.metrics = metrics
        self.queue = queue
        self._on_failure: Callable[[], None] = lambda: None
        self._most_tokens = 2 * max(each.config.batch_tokens for each in translators.values())
        self._waiting = FairQueue()
        self._ended_in_a_row = 0
        self._stopping = False
        with self.changed:
            self.started()
            self.hand_out()
        settle()

    def call_on_failure(self, function: Callable[[], None]) -> None:
        """Set what is called, on another thread, when nothing is translated any more."""
        self._on_failure = function
        if self.failure is not None:
            function()

    def submit(self, sentences: Sequence[Sentence]) -> list[Answer]:
        """See Engine."""
        with self.changed:
            if self._stopping or self.failure is not None:
                raise Stopping
            if len(self._waiting) + len(sentences) > self.queue:
                raise QueueFull
            self._waiting.add(sentences)
            self.hand_out()
        return [each.answer for each in sentences]

    def stop(self) -> None:
        """Translate what waits, then end the processes."""
        with self.changed:
            self._stopping = True
            self.changed.wait_for(lambda: not self._waiting and not any(each.asked for each in self.workers.values()))
            self.close()

    def hand_out(self) -> None:
        """Give sentences that wait to workers."""
        self.metrics.workers.set(len(self.workers))
        in_hand = Counter(each.request for worker in self.workers.values() for each in worker.asked.values())
        while self._waiting and self.workers:
            worker = min(self.workers.values(), key=_tokens)
            tokens = _tokens(worker)

            def fits(sentence: Sentence, tokens: int = tokens) -> bool:
                most = self._most_tokens if in_hand[sentence.request] else 2 * self._most_tokens
                return tokens < most

            sentence = self._waiting.take(fits)
            if sentence is None:
                break
            if not sentence.tries and not sentence.answer.set_running_or_notify_cancel():
                continue
            sentence.tries += 1
            in_hand[sentence.request] += 1
            worker.ask(sentence, _translate, replace(sentence, answer=None))  # type: ignore[arg-type]
            sentence.answer.on_abandon = partial(worker.tell, _abandon, _key(sentence))
        self.metrics.waiting(len(self._waiting))

    def answered(self, waiting: Sentence, result: Any, error: BaseException | None) -> None:
        """Give an answer to the client."""
        self._ended_in_a_row = 0
        super().answered(waiting.answer, result, error)

    def told(self, *values: Any) -> None:
        """Count a step of a worker's search."""
        self.metrics.step(*values)

    def lost(self, worker: Worker, how: str) -> None:
        """A worker has ended: its sentences are the next that others take."""
        self.metrics.workers_ended.inc()
        self._ended_in_a_row += 1
        for each in reversed(worker.asked.values()):
            if each.tries < _MOST_TRIES:
                self._waiting.put_back(each)
            else:
                each.answer.set_exception(UserError("the workers that had it were ended: ask again later"))
        if self._ended_in_a_row > _MOST_ENDED:
            self.fail(UserError(f"worker {worker.number} {how}, as those before it: {self.remedy}"))
            return
        told = f"fasttfm serve: warning: worker {worker.number} {how}: another takes its place"
        print(told, file=sys.stderr, flush=True)

    def fail(self, error: BaseException) -> None:
        """Translate nothing any more."""
        with self.changed:
            super().fail(error)
            for each in self._waiting.clear():
                if each.tries or each.answer.set_running_or_notify_cancel():
                    each.answer.set_exception(error)
        self._on_failure()


def _tokens(worker: Worker) -> int:
    """Source tokens in hand."""
    return sum(each.tokens for each in worker.asked.values())


def _key(sentence: Sentence) -> Hashable:
    return sentence.request, sentence.number


# In the processes


def _prepare(given: tuple[Mapping[str, Translator], int]) -> None:
    translators, _ = given
    for each in translators.values():
        prepare(each.model)
    settle()


class _Searching:
    """The engine of a worker."""

    def __init__(self, given: tuple[Mapping[str, Translator], int], tell: Callable[..., None]) -> None:
        translators, workers = given
        self.step = tell  # of Counts
        self.engine = Engine(translators, self, queue=sys.maxsize, workers=workers)
        self.answers: dict[Hashable, Answer] = {}

    def waiting(self, sentences: int) -> None:
        """See Counts; the server counts its queue itself."""


def _translate(here: _Searching, sentence: Sentence) -> Answer:
    key = _key(sentence)
    (answer,) = here.engine.submit([replace(sentence, answer=Answer())])
    here.answers[key] = answer
    answer.add_done_callback(lambda _: here.answers.pop(key))
    return answer


def _abandon(here: _Searching, key: Hashable) -> None:
    answer = here.answers.get(key)
    if answer is not None:
        answer.abandon()
