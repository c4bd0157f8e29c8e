"""Engines in worker processes, one per core, with one shared queue and one copy of the weights.

The server's process reads requests and assigns sentences from the fair queue (queue.py) to the worker with the fewest
assigned source tokens. A worker runs an Engine; a sentence does not depend on others, so the assignment does not affect
results.

A worker that is killed is replaced, and its sentences are reassigned; if the workers' parent process is killed, or
workers keep ending, the server exits with an error.
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
from fasttfm.translate.server.engine import Engine, Stopping, settle
from fasttfm.translate.server.metrics import Metrics
from fasttfm.translate.server.queue import Answer, FairQueue, Sentence
from fasttfm.translate.translator import Translator

_MOST_TRIES = 2
"""Workers that may end with a sentence before it fails."""
_MOST_ENDED = 10
"""Workers that may end in a row, without a result in between, before the server exits."""


class Pool(WorkerPool):
    """Translates submitted sentences in worker processes; same interface as Engine."""

    def __init__(self, translators: Mapping[str, Translator], metrics: Metrics, *, queue: int, workers: int) -> None:
        """translators: on a CPU; not needed by the caller afterwards. queue: most waiting sentences. Raises UserError
        if the processes cannot start."""
        remedy = "start the server again, with fewer --workers or a smaller --max-tokens if memory did not suffice"
        super().__init__((dict(translators), workers), workers, remedy=remedy, prepare=_prepare, begin=_Searching)
        self.metrics = metrics
        self._on_failure: Callable[[], None] = lambda: None
        self._most_tokens = 2 * max(each.config.batch_tokens for each in translators.values())
        self._waiting = FairQueue(queue)
        self._ended_in_a_row = 0
        self._stopping = False
        with self.changed:
            self.started()
            self.hand_out()
        settle()

    def call_on_failure(self, function: Callable[[], None]) -> None:
        """Set a function that is called, on another thread, when the pool has failed."""
        self._on_failure = function
        if self.failure is not None:
            function()

    def submit(self, sentences: Sequence[Sentence]) -> list[Answer]:
        """See Engine.submit()."""
        with self.changed:
            if self._stopping or self.failure is not None:
                raise Stopping
            self._waiting.add(sentences)
            self.hand_out()
        return [each.answer for each in sentences]

    def stop(self) -> None:
        """Translate the waiting sentences, then end the processes."""
        with self.changed:
            self._stopping = True
            self.changed.wait_for(lambda: not self._waiting and not any(each.asked for each in self.workers.values()))
            self.close()

    def hand_out(self) -> None:
        """Assign waiting sentences to workers."""
        self.metrics.workers.set(len(self.workers))
        assigned = Counter(each.request for worker in self.workers.values() for each in worker.asked.values())
        while self._waiting and self.workers:
            worker = min(self.workers.values(), key=_tokens)
            tokens = _tokens(worker)

            def fits(sentence: Sentence, tokens: int = tokens) -> bool:
                most = self._most_tokens if assigned[sentence.request] else 2 * self._most_tokens
                return tokens < most

            sentence = self._waiting.take(fits)
            if sentence is None:
                break
            if not sentence.tries and not sentence.answer.set_running_or_notify_cancel():
                continue
            sentence.tries += 1
            assigned[sentence.request] += 1
            worker.ask(sentence, _translate, replace(sentence, answer=None))  # type: ignore[arg-type]
            sentence.answer.on_abandon = partial(worker.tell, _abandon, _key(sentence))
        self.metrics.queue.set(len(self._waiting))

    def answered(self, waiting: Sentence, result: Any, error: BaseException | None) -> None:
        """Pass a result to the client."""
        self._ended_in_a_row = 0
        super().answered(waiting.answer, result, error)

    def told(self, *values: Any) -> None:
        """Record a step of a worker's search."""
        self.metrics.step(*values)

    def lost(self, worker: Worker, how: str) -> None:
        """Requeue the sentences of a worker that has ended, at the front."""
        self.metrics.workers_ended.inc()
        self._ended_in_a_row += 1
        for each in reversed(worker.asked.values()):
            if each.tries < _MOST_TRIES:
                self._waiting.put_back(each)
            else:
                each.answer.set_exception(UserError("the workers that translated it ended: retry later"))
        if self._ended_in_a_row > _MOST_ENDED:
            self.fail(UserError(f"worker {worker.number} {how}, as those before it: {self.remedy}"))
            return
        warning = f"fasttfm serve: warning: worker {worker.number} {how}: another takes its place"
        print(warning, file=sys.stderr, flush=True)

    def fail(self, error: BaseException) -> None:
        """Fail all sentences and accept none."""
        with self.changed:
            super().fail(error)
            for each in self._waiting.clear():
                if each.tries or each.answer.set_running_or_notify_cancel():
                    each.answer.set_exception(error)
        self._on_failure()


def _tokens(worker: Worker) -> int:
    """Source tokens assigned to a worker."""
    return sum(each.tokens for each in worker.asked.values())


def _key(sentence: Sentence) -> Hashable:
    return sentence.request, sentence.number


# In the worker processes


def _prepare(given: tuple[Mapping[str, Translator], int]) -> None:
    translators, _ = given
    for each in translators.values():
        prepare(each.model)
    settle()


class _Searching:
    """State of a worker: its engine and open answers."""

    def __init__(self, given: tuple[Mapping[str, Translator], int], tell: Callable[..., None]) -> None:
        translators, workers = given
        self.engine = Engine(translators, tell, queue=sys.maxsize, workers=workers)
        self.answers: dict[Hashable, Answer] = {}


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
