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
from fasttfm.search.batches import inference
from fasttfm.translate import Terminology
from fasttfm.translate.continuous_batching import ContinuousBatching
from fasttfm.translate.server.engine import Engine
from fasttfm.translate.server.metrics import Metrics
from fasttfm.translate.server.queue import Answer, FairQueue, Sentence, sentences_of


@pytest.fixture
def engine(translator):
    engine = Engine({"small": translator}, Metrics().step, queue=100)
    yield engine
    engine.stop()


@pytest.fixture
def equal_steps(monkeypatch):
    """Every step takes a second on the engine's clock."""
    monkeypatch.setattr(
        "fasttfm.translate.server.engine.time", SimpleNamespace(perf_counter=itertools.count(0.0).__next__)
    )


def watch(monkeypatch, at=0, act=lambda: None):
    """Record the number of lines in each step; before step `at` call act()."""
    together = []
    step = ContinuousBatching.step

    def watched(self):
        if len(together) == at:
            act()
        result = step(self)
        together.append(self.search.searched + len(result))
        return result

    monkeypatch.setattr(ContinuousBatching, "step", watched)
    return together


def alone(translator, lines, **options):
    """The translator's results with other options."""
    ours = copy.copy(translator)
    ours.config = dataclasses.replace(translator.config, **options)
    return ours.translate_nbest(lines)


def submit(engine, texts, **options):
    config = dataclasses.replace(engine.translators["small"].config, **options)
    return engine.submit(sentences_of("small", config, texts, [20] * len(texts)))


def test_a_request_joins_a_running_search(engine, translator, monkeypatch):
    """Submitted in the middle of another search, and searched together with it."""
    later = []
    together = watch(monkeypatch, 3, lambda: later.extend(submit(engine, LINES[1:3], min_len=12)))
    first = submit(engine, LINES[:1], min_len=12)
    answers = [first[0].result(PATIENCE), *(each.result(PATIENCE) for each in later)]
    assert max(together) == 3
    assert answers == alone(translator, LINES[:3], min_len=12)


def test_requests_with_other_options_share_steps(engine, translator, monkeypatch):
    all_asked = threading.Event()
    together = watch(monkeypatch, 0, lambda: all_asked.wait(PATIENCE))
    options = [{"alpha": number / 8, "beam": 2 + number % 2, "min_len": 12} for number in range(8)]
    answers = [submit(engine, [line], **given)[0] for line, given in zip(LINES * 2, options)]
    all_asked.set()
    results = [answer.result(PATIENCE) for answer in answers]
    assert max(together) == 8
    for line, given, result in zip(LINES * 2, options, results):
        assert result == alone(translator, [line], **given)[0]


def ended_when(answer, others):
    """A list that receives, when this answer arrives, the number of other answers that had arrived."""
    ended = []
    answer.add_done_callback(lambda _: ended.append(sum(each.done() for each in others)))
    return ended


def test_a_short_request_does_not_wait_for_a_long_one(engine, monkeypatch, equal_steps):
    """Even if the long one takes the whole budget."""
    both_asked = threading.Event()
    watch(monkeypatch, 0, lambda: both_asked.wait(PATIENCE))
    long = submit(engine, LINES[:1] * 60, beam=8, min_len=100, max_len_b=200)
    (short,) = submit(engine, ["a dog"])
    ended = ended_when(short, long)
    both_asked.set()
    assert short.result(PATIENCE)
    assert ended == [0]
    for each in long:
        each.abandon()


@pytest.mark.parametrize(("workers", "most"), [(1, 64), (4, 16)])
def test_engines_share_the_budget(translator, monkeypatch, workers, most):
    together = watch(monkeypatch)
    engine = Engine({"small": translator}, Metrics().step, queue=100, workers=workers)
    config = dataclasses.replace(translator.config, min_len=9)
    assert translator.config.batch_tokens == 1024
    for each in engine.submit(sentences_of("small", config, LINES[:1] * 90, [16] * 90)):
        each.result(PATIENCE)
    engine.stop()
    assert max(together) == most


def test_a_short_request_does_not_wait_for_required_phrases_of_another(engine, translator, equal_steps):
    """These are searched in small batches, between which joined searches take steps."""
    config = dataclasses.replace(translator.config, beam=8, min_len=20)
    terms = Terminology([("dog", ["Hund Boot"])], translator.target_tokenizer)
    lines = ["a dog runs"] * 60
    sentences = sentences_of("small", config, lines, [20] * 60, required=[terms.required(line) for line in lines])
    long = [each.answer for each in sentences]
    short, ended = [], []

    def ask(_):  # on the engine's thread, when the first of them has its translation
        short.extend(submit(engine, ["a dog"]))
        ended.append(ended_when(short[0], long))

    long[0].add_done_callback(ask)
    engine.submit(sentences)
    long[0].result(PATIENCE)
    wait_until(lambda: ended)
    assert short[0].result(PATIENCE)
    assert ended[0][0] < 30
    for each in long:
        each.abandon()


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
    assert together[:7] == [*[3] * 6, 0]
    assert len(together) <= 7
    assert submit(engine, ["a dog"])[0].result(PATIENCE)


def test_long_requests_are_searched_separately(engine, monkeypatch):
    keys = []
    search_of = engine._search_of

    def noted(sentence):  # on the engine's thread, as keys require
        keys.append(engine._key(sentence))
        return search_of(sentence)

    monkeypatch.setattr(engine, "_search_of", noted)

    def key(count):
        for each in submit(engine, ["a"] * count, beam=4):
            each.result(PATIENCE)
        found = set(keys)
        keys.clear()
        assert len(found) == 1
        return found.pop()

    assert key(1) == key(2)
    assert key(8) == key(30)
    assert key(1) != key(8), "a short request would wait for steps with a long one's rows"


def test_a_queue_takes_turns_by_work():
    def sentence(request, tokens):
        return Sentence("small", DecodingConfig(beam=2), "", tokens, Answer(), request)

    queue = FairQueue()
    queue.add([sentence("many", 10) for _ in range(4)])
    assert queue.take(lambda _: True).request == "many"
    queue.add([sentence("few", 10), sentence("few", 10), sentence("large", 100)])
    taken = [queue.take(lambda _: True) for _ in range(6)]
    assert [each.request for each in taken[:3]] != ["many"] * 3
    assert [each.request for each in taken].index("large") < 4, "a new request starts level with the others"
    assert len(queue) == 0
    assert queue.take(lambda _: True) is None


def test_a_queue_skips_abandoned_and_unfitting_sentences():
    queue = FairQueue()
    sentences = [Sentence("small", DecodingConfig(), "", tokens, Answer(), tokens) for tokens in (50, 5, 7)]
    queue.add(sentences)
    sentences[1].answer.abandon()
    assert queue.take(lambda each: each.tokens < 10) is sentences[2]
    assert queue.take(lambda each: each.tokens < 10) is None
    assert list(queue) == [sentences[0]]


def test_a_failure_reaches_its_clients_and_later_requests_succeed(engine, translator, monkeypatch):
    failing = iter([True])
    step = ContinuousBatching.step

    def broken(self):
        if next(failing, False):
            raise UserError("no memory")
        return step(self)

    monkeypatch.setattr(ContinuousBatching, "step", broken)
    for each in submit(engine, LINES[:2]):
        with pytest.raises(UserError, match="no memory"):
            each.result(PATIENCE)
    (answer,) = submit(engine, LINES[3:4])
    assert answer.result(PATIENCE) == translator.translate_nbest(LINES[3:4])[0]


def test_weights_that_cannot_be_prepared_fail_a_request_and_not_the_engine(engine, translator, monkeypatch):
    failing = iter([True, True])  # when it is admitted, and when it is added

    def broken(*given, **options):
        if next(failing, False):
            raise MemoryError("no memory")
        return inference(*given, **options)

    monkeypatch.setattr("fasttfm.translate.server.engine.inference", broken)
    with pytest.raises(MemoryError, match="no memory"):
        submit(engine, ["a dog"])[0].result(PATIENCE)
    assert submit(engine, ["a dog"])[0].result(PATIENCE) == translator.translate_nbest(["a dog"])[0]


def test_a_sentence_that_cannot_join_leaves_the_search(engine, translator):
    (answer,) = engine.submit(sentences_of("small", translator.config, ["a dog"], [20], ["Boot " * 600]))
    with pytest.raises(UserError, match=r"the prefix .* has .* tokens"):
        answer.result(PATIENCE)
    answer.abandon()  # as the server does when it has answered
    assert submit(engine, ["a dog"])[0].result(PATIENCE) == translator.translate_nbest(["a dog"])[0]
    wait_until(lambda: not engine._searches)


def test_an_alignment_that_fails_leaves_other_sentences_of_the_search(translator):
    ours = imported(translator)
    engine = Engine({"small": ours}, Metrics().step, queue=100)
    config = dataclasses.replace(translator.config, min_len=12)
    with engine._changed:  # joined together
        (aligned,) = engine.submit(sentences_of("small", translator.config, ["a dog"], [20], aligned=True))
        (plain,) = engine.submit(sentences_of("small", config, ["a dog"], [20]))
    with pytest.raises(UserError, match="imported"):
        aligned.result(PATIENCE)
    assert [plain.result(PATIENCE)] == alone(ours, ["a dog"], min_len=12)
    engine.stop()


@pytest.mark.parametrize("options", [{"mbr_samples": 4}, {"sampling": True}])
def test_samples_do_not_depend_on_the_batch(engine, translator, monkeypatch, options):
    """Nor on which sentences of a request another worker translates."""
    monkeypatch.setattr("fasttfm.translate.server.engine.takes_lines", lambda _: False)
    config = dataclasses.replace(translator.config, temperature=3.0, **options)
    one, two = (sentences_of("small", config, LINES[:3], [20] * 3) for _ in range(2))
    with engine._changed:
        answers = engine.submit(one[::2]) + engine.submit(two[1:])
    first, second, third = alone(translator, LINES[:3], temperature=3.0, **options)
    assert [each.result(PATIENCE) for each in answers] == [first, third, second, third]


def test_options_that_need_whole_batches_are_batched(engine, translator, monkeypatch):
    monkeypatch.setattr(ContinuousBatching, "step", None)
    (answer,) = submit(engine, LINES[:1], mbr_samples=2)
    assert len(answer.result(PATIENCE)) == 1


@pytest.mark.parametrize("joins", [True, False])
def test_terms_and_alignments_equal_the_translators_with_and_without_joining(translator, monkeypatch, joins):
    """Without numba and joining, all sentences are translated batch by batch."""
    if not joins:
        monkeypatch.setattr("fasttfm.translate.server.engine.takes_lines", lambda _: False)
    terms = Terminology([("dog", ["Boot", "Männer"])], translator.target_tokenizer)
    ours = copy.copy(translator)
    ours.aligned, ours.terminology = True, terms
    engine = Engine({"small": translator}, Metrics().step, queue=100)
    required = [terms.required(line) for line in LINES]
    answers = engine.submit(sentences_of("small", translator.config, LINES, [20] * len(LINES), None, required, True))
    assert [each.result(PATIENCE) for each in answers] == ours.translate_nbest(LINES)
    engine.stop()


def test_short_requests_get_more_time_than_long_ones(engine, monkeypatch, equal_steps):
    """Four steps for each step of the others."""
    kinds, short, step = [], [], ContinuousBatching.step

    def watched(self):
        if len(kinds) == 3:
            short.extend(submit(engine, ["a dog"], beam=1, min_len=60, max_len_b=70))
        kinds.append(any(each.config.min_len == 200 for each in self.search.waiting) or self.search.searched > 1)
        return step(self)

    monkeypatch.setattr(ContinuousBatching, "step", watched)
    long = submit(engine, LINES[:1] * 30, beam=4, min_len=200, max_len_b=300)
    wait_until(lambda: short)
    assert short[0].result(PATIENCE)
    # From the short request's first step to its last; before and after, the others take all steps.
    both = kinds[kinds.index(False, 3) : len(kinds) - kinds[::-1].index(False)]
    of_short = both.count(False)
    of_long = len(both) - of_short
    assert of_short >= 60
    assert of_short / of_long > 3, (of_short, of_long)
    for each in long:
        each.abandon()
