"""The engine thread: which sentences are searched together, fairness, failures.

Actions during a search run inside a step, on the engine's thread, so they do not depend on the machine's speed.
"""

import copy
import dataclasses
import itertools
import threading
from types import SimpleNamespace

import pytest
from model_dirs import LINES
from served import imported
from waiting import PATIENCE, wait_until

pytest.importorskip("numba")
from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError
from fasttfm.translate.server import engine as module
from fasttfm.translate.server.engine import Engine, _Joined
from fasttfm.translate.server.metrics import Metrics
from fasttfm.translate.server.queue import Answer, FairQueue, Sentence, sentences_of


@pytest.fixture
def engine_of():
    """engine_of(translator, workers=1): an engine that ends with the test."""
    engines = []

    def make(translator, **options):
        engines.append(Engine({"small": translator}, Metrics().step, queue=100, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.stop()


@pytest.fixture
def engine(engine_of, translator):
    return engine_of(translator)


@pytest.fixture
def equal_steps(monkeypatch):
    """Every step takes a second on the engine's clock."""
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=itertools.count(0.0).__next__))


def watch(monkeypatch, at=0, act=lambda: None):
    """Record the number of lines in each step; before step `at` call act()."""
    together = []
    step = _Joined.step

    def watched(self):
        if len(together) == at:
            act()
        together.append(len(self.sentences))
        return step(self)

    monkeypatch.setattr(_Joined, "step", watched)
    return together


def alone(translator, lines, **options):
    """The translator's results with other options."""
    ours = copy.copy(translator)
    ours.config = dataclasses.replace(translator.config, **options)
    return ours.translate_nbest(lines)


def submit(engine, texts, **options):
    config = dataclasses.replace(engine.translators["small"].config, **options)
    return engine.submit(sentences_of("small", config, texts, [20] * len(texts)))


def results(answers):
    return [each.result(PATIENCE) for each in answers]


def test_requests_with_other_options_join_a_running_search(engine, translator, monkeypatch):
    """Submitted in the middle of another search, and searched together with it."""
    later = []
    options = [{"alpha": number / 8, "beam": 2 + number % 2, "min_len": 12} for number in range(7)]
    asked = list(zip(LINES[1:], options))
    together = watch(monkeypatch, 3, lambda: [later.extend(submit(engine, [line], **given)) for line, given in asked])
    first = results(submit(engine, LINES[:1], min_len=12))
    assert first == alone(translator, LINES[:1], min_len=12)
    assert results(later) == [alone(translator, [line], **given)[0] for line, given in asked]
    assert max(together) == 8


def test_a_short_request_gets_more_time_than_a_long_one_and_does_not_wait_for_it(engine, monkeypatch, equal_steps):
    """Four steps for each step of the others, which take the whole budget."""
    kinds, short, step = [], [], _Joined.step

    def watched(self):
        if len(kinds) == 3:
            short.extend(submit(engine, ["a dog"], beam=1, min_len=60, max_len_b=70))
        kinds.append(len(self.sentences) > 1)
        return step(self)

    monkeypatch.setattr(_Joined, "step", watched)
    long = submit(engine, LINES[:1] * 60, beam=4, min_len=200, max_len_b=300)
    wait_until(lambda: short)
    assert short[0].result(PATIENCE)
    # From the short request's first step to its last; before and after, the others take all steps.
    both = kinds[kinds.index(False, 3) : len(kinds) - kinds[::-1].index(False)]
    of_short = both.count(False)
    assert of_short >= 60
    assert of_short / (len(both) - of_short) > 3
    for each in long:
        each.abandon()


@pytest.mark.parametrize(("workers", "most"), [(1, 64), (4, 16)])
def test_engines_share_the_budget(engine_of, translator, monkeypatch, workers, most):
    together = watch(monkeypatch)
    assert translator.config.batch_tokens == 1024
    config = dataclasses.replace(translator.config, min_len=9)
    results(engine_of(translator, workers=workers).submit(sentences_of("small", config, LINES[:1] * 90, [16] * 90)))
    assert max(together) == most


def test_abandoned_sentences_leave_the_search(engine, monkeypatch):
    answers, asked = [], threading.Event()

    def leave():
        assert asked.wait(PATIENCE)
        for each in answers:
            each.abandon()

    together = watch(monkeypatch, 5, leave)
    answers += submit(engine, LINES[:3], min_len=500, max_len_b=600)
    asked.set()
    for each in answers:
        assert each.cancelled() or isinstance(each.exception(PATIENCE), UserError)
    assert together == [3] * 6
    assert results(submit(engine, ["a dog"]))


def test_a_queue_takes_turns_by_work():
    def sentence(request, tokens):
        return Sentence("small", DecodingConfig(beam=2), "", tokens, Answer(), request)

    queue = FairQueue()
    queue.add([sentence("many", 10) for _ in range(4)])
    assert queue.take(lambda _: True).request == "many"
    queue.add([sentence("few", 10), sentence("few", 10), sentence("large", 100)])
    taken = [queue.take(lambda _: True).request for _ in range(6)]
    assert taken[:3] != ["many"] * 3
    assert taken.index("large") < 4, "a new request starts level with the others"
    assert len(queue) == 0
    assert queue.take(lambda _: True) is None


def test_a_queue_skips_abandoned_and_unfitting_sentences():
    queue = FairQueue()
    sentences = [Sentence("small", DecodingConfig(), "", tokens, Answer(), tokens) for tokens in (50, 5, 7)]
    queue.add(sentences)
    sentences[1].answer.abandon()
    assert queue.take(lambda each: each.tokens < 10) is sentences[2]
    assert queue.take(lambda each: each.tokens < 10) is None
    assert queue.clear() == [sentences[0]]


@pytest.mark.parametrize(
    ("where", "name", "times"),
    [(_Joined, "step", 1), (module, "inference", 2)],  # the weights: when it is admitted, and when added
    ids=["a step", "the weights"],
)
def test_a_failure_reaches_its_clients_and_later_requests_succeed(engine, translator, monkeypatch, where, name, times):
    failing, right = iter([True] * times), getattr(where, name)

    def broken(*given, **options):
        if next(failing, False):
            raise MemoryError("no memory")
        return right(*given, **options)

    monkeypatch.setattr(where, name, broken)
    with engine._changed:  # one search of both
        answers = submit(engine, LINES[: 3 - times])
    for each in answers:
        with pytest.raises(MemoryError, match="no memory"):
            each.result(PATIENCE)
    assert results(submit(engine, LINES[3:4])) == translator.translate_nbest(LINES[3:4])


def test_a_sentence_that_cannot_join_or_be_aligned_leaves_the_others_of_its_search(engine_of, translator):
    engine = engine_of(imported(translator))
    config = dataclasses.replace(translator.config, min_len=12)
    with engine._changed:  # joined together
        (long,) = engine.submit(sentences_of("small", translator.config, ["a dog"], [20], ["Boot " * 600]))
        (aligned,) = engine.submit(sentences_of("small", translator.config, ["a dog"], [20], aligned=True))
        (plain,) = engine.submit(sentences_of("small", config, ["a dog"], [20]))
    for answer, words in ((long, "the prefix .* has .* tokens"), (aligned, "imported")):
        with pytest.raises(UserError, match=words):
            answer.result(PATIENCE)
        answer.abandon()  # as the server does when it has answered
    assert results([plain]) == alone(engine.translators["small"], ["a dog"], min_len=12)
    wait_until(lambda: not engine._searches)


@pytest.mark.parametrize("options", [{"mbr_samples": 4}, {"sampling": True}])
def test_samples_do_not_depend_on_the_batch(engine, translator, monkeypatch, options):
    """Nor on which sentences of a request another worker translates."""
    monkeypatch.setattr(module, "takes_lines", lambda _: False)
    config = dataclasses.replace(translator.config, temperature=3.0, **options)
    one, two = (sentences_of("small", config, LINES[:3], [20] * 3) for _ in range(2))
    with engine._changed:
        answers = engine.submit(one[::2]) + engine.submit(two[1:])
    first, second, third = alone(translator, LINES[:3], temperature=3.0, **options)
    assert results(answers) == [first, third, second, third]


def test_options_that_need_whole_batches_are_batched(engine, monkeypatch):
    monkeypatch.setattr(_Joined, "step", None)
    assert results(submit(engine, LINES[:1], mbr_samples=2))
