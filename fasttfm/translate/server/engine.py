"""Engine: one thread that translates the sentences of all clients with continuous batching.

Sentences join running searches (continuous batching) whatever their options. A model has two searches that take turns,
one for requests of much work and one for short requests, which gets four times as much time while both run. So a short
request is searched beside long ones and waits at most for one of their steps; long ones always get a fifth of the time.
Sentences are admitted from the fair queue (queue.py) up to a budget of source tokens, and up to twice the budget one
sentence of each request that has none running.

Options that need whole batches (see takes_options()) are translated batch by batch between these steps. On a CPU a
sentence's translation has the same bits whatever is searched beside it, so concurrent requests affect only latency.
Abandoned sentences leave at the next step.
"""

import copy
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError
from fasttfm.search.batches import inference
from fasttfm.search.hypotheses import Hypothesis, refuse_failed
from fasttfm.search.search import running_search, takes_sentences
from fasttfm.search.tasks import Waiting
from fasttfm.translate.server.queue import Answer, FairQueue, Sentence
from fasttfm.translate.translator import Translation, Translator

_MUCH_WORK = 512
"""Work (rows times steps) from which a request counts as long: 128 tokens with a beam of 4. Also the maximum of a whole
batch while joined searches wait for its end."""

_PREFERENCE = 4.0
"""Time of a search of short requests for each second of another one, while both run."""

_TURN = 0.05
"""Seconds before switching to another model's searches: switching takes milliseconds."""


def settle() -> None:
    """Exclude current objects (modules, models) from garbage collection: scanning them stops all threads."""
    gc.collect()
    gc.freeze()


class Stopping(Exception):
    """The engine is stopping and accepts no sentences."""


_Ended = list[tuple[Sentence, list[Translation] | UserError]]
"""Finished sentences, with their translations or the error."""


def takes_lines(translator: Translator) -> bool:
    """Return whether the model supports joining: on a GPU, and on a CPU with numba. Call inside inference()."""
    return takes_sentences(translator.model, DecodingConfig())


def takes_options(translator: Translator, config: DecodingConfig) -> bool:
    """Return whether sentences with these options may join a running search; diverse beams, coverage, terminology and
    MBR need whole batches."""
    whole = config.mbr_samples or config.coverage_penalty or config.diverse_beam_groups > 1
    return not whole and config.batch_invariant and translator.terminology is None


class _Joined:
    """A running search that sentences join and leave at any step, with the results of Translator.translate_nbest().

    Use inside inference(), if takes_lines(), with options that takes_options().
    """

    def __init__(self, model: str, translator: Translator, preference: float) -> None:
        """preference: time for each second of another search."""
        self.model, self.preference = model, preference
        self.seconds = 0.0
        """Time received divided by preference, plus the least of all searches when this one began."""
        self._translator = translator
        search = running_search(translator.model, DecodingConfig())
        self.search = search(translator.model, translator.config, banned=translator.banned)
        self._new: list[Waiting] = []
        self._sources: dict[Any, list[int]] = {}
        """Ids of every sentence, end-of-sentence included; none of one without text."""

    @property
    def sentences(self) -> Sequence[Sentence]:
        return [*self._sources]

    def add(self, sentence: Sentence) -> None:
        translator = self._translator
        source = translator.encode_lines([sentence.text], [sentence.number]).get(0, [])
        if source:
            shortlist, prefix = translator.shortlist, translator.beginning(sentence.prefix)
            allowed = None if shortlist is None else shortlist.tokens(source)
            self._new.append(Waiting(sentence, source, prefix, sentence.number, allowed, config=sentence.config))
        self._sources[sentence] = source

    def step(self) -> _Ended:
        gone = {each for each in self._sources if each.answer.abandoned}
        if gone:
            self.search.drop(gone)
        new, self._new = [each for each in self._new if each.key not in gone], []
        ended: dict[Any, list[Translation] | UserError]
        ended = {each: [Translation("", 0.0, 0.0)] for each, source in self._sources.items() if not source}
        ended |= self.search.join(new)
        ended |= {each: self._translations(each, found) for each, found in self.search.step()}
        ended |= dict.fromkeys(gone, UserError("the request was cancelled"))
        for each in ended:  # if anything above fails, all sentences are still here, for its error
            del self._sources[each]
        return [*ended.items()]

    def _translations(self, sentence: Any, found: list[Hypothesis]) -> list[Translation] | UserError:
        translator = self._translator
        try:
            refuse_failed(found)
            translations, tokens = translator.translations(found, distinct=not sentence.config.sampling)
            if sentence.aligned or translator.aligned:
                source = self._sources[sentence]
                translator.align([sentence.text], {0: source}, {0: tokens}, [translations])
        except UserError as error:
            return error
        return translations


class _Batch:
    """Sentences with the same options, translated as one batch in a single step."""

    def __init__(self, model: str, translator: Translator) -> None:
        self.model, self.preference, self.seconds = model, 1.0, 0.0
        self._translator = translator
        self.sentences: list[Sentence] = []

    def add(self, sentence: Sentence) -> None:
        self.sentences.append(sentence)

    def step(self) -> _Ended:
        results = self._translator.translate_nbest(
            [each.text for each in self.sentences],
            [each.prefix for each in self.sentences],
            [each.number for each in self.sentences],
            [each.required for each in self.sentences] if self.sentences[0].required else None,
        )
        done: _Ended = [*zip(self.sentences, results, strict=True)]
        self.sentences = []
        return done


class Engine:
    """Translates submitted sentences on a thread of its own; see the module."""

    def __init__(
        self,
        translators: Mapping[str, Translator],
        on_step: Callable[[float, int, int, int], None],
        on_waiting: Callable[[int], None] = lambda sentences: None,
        *,
        queue: int,
        workers: int = 1,
    ) -> None:
        """on_step: called with the seconds of a step, sentences searched together, how many of them ended, and their
        source tokens. on_waiting: called with the number of waiting sentences. queue: most of them. workers: engines
        that share the budget of batch_tokens; with the whole budget each, a step of long requests would take one core
        as long as it takes all cores together."""
        self.translators = translators
        self.workers = workers
        self._on_step, self._on_waiting = on_step, on_waiting
        self._waiting = FairQueue(queue)
        self._searches: dict[Hashable, _Joined | _Batch] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._inside = ExitStack()
        self._settled = False
        self._model: str | None = None
        """The model whose weights are prepared for a search."""
        self._takes_lines: dict[str, bool] = {}
        """Model -> whether lines join its searches; cleared when nothing is running."""
        self._thread = threading.Thread(target=self._run, name="translations", daemon=True)
        self._thread.start()

    def submit(self, sentences: Sequence[Sentence]) -> list[Answer]:
        """Queue sentences_of() a request, and return their answers. Raises QueueFull, Stopping."""
        with self._changed:
            if self._stopping:
                raise Stopping
            self._waiting.add(sentences)
            self._on_waiting(len(self._waiting))
            self._changed.notify()
        return [each.answer for each in sentences]

    def stop(self) -> None:
        """Translate the waiting sentences, then end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._searches):
                    if self._takes_lines and not self._settled:  # after the first search everything is imported
                        self._settled = True
                        settle()
                    self._enter(None)  # weights and modules may change while no search is running
                    self._takes_lines.clear()
                    if self._stopping:
                        return
                    self._changed.wait()
            self._admit()
            if self._searches:
                self._step(*self._next_search())

    def _next_search(self) -> tuple[Hashable, _Joined | _Batch]:
        """The search with the least time received; the prepared model has a small advantage."""

        def time_received(search: _Joined | _Batch) -> float:
            return search.seconds - (_TURN if search.model == self._model else 0.0)

        return min(self._searches.items(), key=lambda each: time_received(each[1]))

    def _step(self, key: Hashable, search: _Joined | _Batch) -> None:
        begin, together = time.perf_counter(), len(search.sentences)
        try:
            self._enter(search.model if isinstance(search, _Joined) else None)
            ended = search.step()
        except BaseException as error:
            del self._searches[key]
            for each in search.sentences:
                each.answer.set_exception(error)
            return
        taken = time.perf_counter() - begin
        search.seconds += taken / search.preference
        if not search.sentences:
            del self._searches[key]
        self._on_step(taken, together, len(ended), sum(each.tokens for each, _ in ended))
        for each, result in ended:
            if isinstance(result, UserError):
                each.answer.set_exception(result)
            else:
                each.answer.set_result(result)

    def _admit(self) -> None:
        """Admit waiting sentences to the searches, as many as fit."""
        searched = Counter(each.request for search in self._searches.values() for each in search.sentences)

        def fits(sentence: Sentence) -> bool:
            try:
                search = self._searches.get(self._key(sentence))
            except Exception:  # the weights cannot be prepared: _search_of() raises it for this sentence
                return True
            if search is None or not search.sentences:
                return True
            if isinstance(search, _Batch) and self._takes_lines.get(sentence.model):  # other searches wait for its end
                return sum(each.work for each in search.sentences) + sentence.work <= _MUCH_WORK
            budget = self.translators[sentence.model].config.batch_tokens // self.workers
            left = budget - sum(each.tokens for each in search.sentences)
            tokens = min(sentence.tokens, budget)  # a longer one must be admitted too
            return left >= tokens or (not searched[sentence.request] and left + budget >= tokens)

        while True:
            with self._changed:
                sentence = self._waiting.take(fits)
                self._on_waiting(len(self._waiting))
            if sentence is None:
                return
            if not sentence.answer.set_running_or_notify_cancel():
                continue
            searched[sentence.request] += 1
            try:
                self._search_of(sentence).add(sentence)
            except BaseException as error:
                sentence.answer.set_exception(error)

    def _key(self, sentence: Sentence) -> Hashable:
        """Key: sentences with equal keys are searched together."""
        if self._can_join(sentence):
            return sentence.model, sentence.request_work >= _MUCH_WORK
        return sentence.model, sentence.config, sentence.aligned, bool(sentence.required)

    def _can_join(self, sentence: Sentence) -> bool:
        model, translator = sentence.model, self.translators[sentence.model]
        if not isinstance(translator, Translator):  # another system, as in benchmarks/open_loop.py
            return False
        if model not in self._takes_lines:
            self._enter(model)
            self._takes_lines[model] = takes_lines(translator)
        return self._takes_lines[model] and not sentence.required and takes_options(translator, sentence.config)

    def _search_of(self, sentence: Sentence) -> _Joined | _Batch:
        key = self._key(sentence)
        if key not in self._searches:
            translator = self.translators[sentence.model]
            search: _Joined | _Batch
            if self._can_join(sentence):
                self._enter(sentence.model)
                preference = 1.0 if sentence.request_work >= _MUCH_WORK else _PREFERENCE
                search = _Joined(sentence.model, translator, preference)
            else:
                translator = copy.copy(translator)
                translator.config, translator.aligned = sentence.config, sentence.aligned
                search = _Batch(sentence.model, translator)
            search.seconds = min((each.seconds for each in self._searches.values()), default=0.0)
            self._searches[key] = search
        return self._searches[key]

    def _enter(self, model: str | None) -> None:
        """Prepare this model's weights for searches on this thread; None: release them."""
        if model == self._model:
            return
        self._inside.close()
        self._model = None
        if model is not None:
            self._inside.enter_context(inference(self.translators[model].model, batch_invariant=True))
            self._model = model
