"""Engines in processes of their own, one a core, with one queue and one copy of the weights between them.

The server's process reads requests and hands sentences out, taken in turns from the requests (queue.py), to the worker
with the fewest source tokens in hand. A worker searches what it has as the engine of a single process does (engine.py),
and as a sentence does not depend on the others, who translates it changes nothing.

A worker that is killed is replaced by another, and its sentences are given to others; where the workers' first process
is killed, or workers keep ending, the server ends and says so.
"""

import itertools
import os
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import Any

from fasttfm.children import signal_name
from fasttfm.decoding.translator import Translator
from fasttfm.errors import UserError
from fasttfm.processes import end_group, start_process
from fasttfm.serving.engine import QueueFull, Stopping, settle
from fasttfm.serving.metrics import Metrics
from fasttfm.serving.queue import Answer, FairQueue, Sentence
from fasttfm.serving.worker import begin

_MOST_TRIES = 2
"""Workers that may end while they have a sentence, before it is given up."""
_MOST_ENDED = 10
"""Workers that may end one after the other without an answer in between, before the server does."""


@dataclass(eq=False, slots=True)
class _Worker:
    """A process, and what it has been given."""

    number: int
    pid: int
    connection: Connection
    sentences: dict[int, Sentence] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Source tokens in hand."""
        return sum(each.tokens for each in self.sentences.values())


class Pool:
    """Translates what is submitted, as Engine does, by several processes."""

    def __init__(self, translators: Mapping[str, Translator], metrics: Metrics, *, queue: int, workers: int) -> None:
        """translators: on a CPU; they are not needed here any more afterwards. queue: most sentences that may wait.
        UserError where the processes cannot begin."""
        self.metrics = metrics
        self.queue = queue
        self.failure: str | None = None
        """Why nothing is translated any more."""
        self._on_failure: Callable[[], None] = lambda: None
        self._most_tokens = 2 * max(each.config.batch_tokens for each in translators.values())
        self._waiting = FairQueue()
        self._workers: dict[int, _Worker] = {}
        self._ended_in_a_row = 0
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopping = self._stopped = False
        self._start(translators, workers)
        settle()
        self._thread = threading.Thread(target=self._listen, name="workers", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        with self._changed:
            return [each.pid for each in self._workers.values()]

    def call_on_failure(self, function: Callable[[], None]) -> None:
        """Set what is called, on another thread, when nothing is translated any more."""
        self._on_failure = function
        if self.failure is not None:
            function()

    def submit(self, sentences: Sequence[Sentence]) -> list[Answer]:
        """See Engine."""
        with self._changed:
            if self._stopping or self.failure is not None:
                raise Stopping
            if len(self._waiting) + len(sentences) > self.queue:
                raise QueueFull
            self._waiting.add(sentences)
            self._hand_out()
        return [each.answer for each in sentences]

    def stop(self) -> None:
        """Translate what waits, then end the processes."""
        with self._changed:
            self._stopping = True
            while self.failure is None and (self._waiting or any(each.sentences for each in self._workers.values())):
                self._changed.wait()
            self._stopped = True
        self._end()
        self._thread.join()

    def _start(self, translators: Mapping[str, Translator], workers: int) -> None:
        ours, theirs = socket.socketpair()
        process = start_process(begin, dict(translators), [theirs], workers)
        self._control = Connection(ours.detach())
        self._end = weakref.finalize(self, end_group, process)
        try:
            while len(self._workers) < workers:
                self._hear(self._control.recv())
        except (EOFError, OSError):
            self._end()
            raise UserError("the workers ended before they had begun: give --workers 1") from None
        except UserError:
            self._end()
            raise

    def _listen(self) -> None:
        """The thread that hears of answers, of workers that end, and of new ones."""
        while not self._stopped:
            workers = {each.connection: each for each in self._workers.values()}
            ready: list[Any] = wait([self._control, *workers])
            for each in ready:
                try:
                    message = each.recv()
                except (EOFError, OSError):
                    if each is self._control:
                        self._fail("the process that had started the workers was ended: start the server again")
                        return
                    self._lose(workers[each])
                    continue
                if each is self._control:
                    self._hear(message)
                else:
                    self._take(workers[each], *message)
            if self.failure is not None:
                return

    def _hear(self, message: tuple) -> None:
        """Take a message of the first process."""
        kind, *values = message
        if kind == "failed":
            raise UserError(f"the workers could not begin: {values[0]}")
        number, value = values
        if kind == "begun":
            worker = _Worker(number, value, Connection(recv_handle(self._control)))
            if number in self._workers:  # whose end was heard of here first
                self._lose(self._workers[number])
            with self._changed:
                self._workers[number] = worker
                self.metrics.workers.set(len(self._workers))
                self._hand_out()
        elif not self._stopped:
            how = f"was ended by {signal_name(os.WTERMSIG(value))}" if os.WIFSIGNALED(value) else "ended"
            self.metrics.workers_ended.inc()
            self._ended_in_a_row += 1
            if self._ended_in_a_row > _MOST_ENDED:
                self._fail(f"worker {number} {how}, as those before it: give fewer --workers or smaller --max-tokens")
                return
            print(
                f"fasttfm serve: warning: worker {number} {how}: another takes its place", file=sys.stderr, flush=True
            )

    def _take(self, worker: _Worker, kind: str, *values: Any) -> None:
        """Take a message of a worker."""
        if kind == "step":
            self.metrics.step(*values)
            return
        number, translations, failure = values
        with self._changed:
            sentence = worker.sentences.pop(number)
            self._ended_in_a_row = 0
            self._hand_out()
            self._changed.notify_all()
        if failure is None:
            sentence.answer.set_result(translations)
        else:
            sentence.answer.set_exception(UserError(failure))

    def _lose(self, worker: _Worker) -> None:
        """A worker has ended: its sentences are the next that others take."""
        with self._changed:
            if self._workers.get(worker.number) is worker:
                del self._workers[worker.number]
            self.metrics.workers.set(len(self._workers))
            given_up = [each for each in worker.sentences.values() if each.tries >= _MOST_TRIES]
            again = [each for each in worker.sentences.values() if each.tries < _MOST_TRIES]
            worker.sentences.clear()
            for each in reversed(again):
                self._waiting.put_back(each)
            self._hand_out()
            self._changed.notify_all()
        worker.connection.close()
        for each in given_up:
            each.answer.set_exception(UserError("the workers that had it were ended: ask again later"))

    def _hand_out(self) -> None:
        """Gives sentences that wait to workers, inside the lock."""
        in_hand = Counter(each.request for worker in self._workers.values() for each in worker.sentences.values())
        while self._waiting and self._workers:
            worker = min(self._workers.values(), key=lambda each: each.tokens)
            tokens = worker.tokens

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
            number = next(self._numbers)
            worker.sentences[number] = sentence
            sentence.answer.on_abandon = partial(_send, worker.connection, "abandon", number)
            _send(worker.connection, "translate", number, replace(sentence, answer=None))  # type: ignore[arg-type]
        self.metrics.waiting(len(self._waiting))

    def _fail(self, message: str) -> None:
        with self._changed:
            if self._stopped or self.failure is not None:
                return
            self.failure = message
            sentences = [each for worker in self._workers.values() for each in worker.sentences.values()]
            waited = self._waiting.clear()
            sentences += [each for each in waited if each.tries or each.answer.set_running_or_notify_cancel()]
            self._workers.clear()
            self._changed.notify_all()
        for each in sentences:
            each.answer.set_exception(UserError(message))
        self._on_failure()


def _send(connection: Connection, *message: Any) -> None:
    """Tell a worker; the thread that listens notices one that has ended."""
    with suppress(OSError):
        connection.send(message)
