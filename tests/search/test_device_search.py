"""The device search, on CPU tensors: results, what a CUDA graph can capture, memory limits, threads."""

import copy
import gc
import random
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar
from unittest import mock

import pytest
import torch
from replayable import Watched

from benchmarks.host import function_calls
from fasttfm.errors import UserError
from fasttfm.functional import backend
from fasttfm.search import DecodingConfig, greedy, search, search_ids, top_k
from fasttfm.search.batches import inference
from fasttfm.search.device import capacity, engine
from fasttfm.search.device.engine import Engine
from fasttfm.search.device.search import DeviceSearch, _of_models, takes
from fasttfm.search.device.state import NOTHING, Sizes, State
from fasttfm.search.ensemble import Ensemble
from fasttfm.search.tasks import Task, Waiting

from .device_cases import KINDS, VOCABULARY, a_case, assert_same, drawn, sources_of, transformer
from .small_models import model_of
from .table_model import EOS

CPU = torch.device("cpu")


@pytest.fixture
def on_device(monkeypatch):
    """Run all searches on the device engine, on CPU tensors."""
    monkeypatch.setattr(search, "running_search", lambda *_: DeviceSearch)


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_those_of_the_host(kind, seed, monkeypatch):
    model, sources, config, given = a_case(kind, seed)
    theirs = search_ids(model, sources, config, **given)
    monkeypatch.setattr(search, "running_search", lambda *_: DeviceSearch)
    assert_same(search_ids(model, sources, config, **given), theirs)


@pytest.mark.parametrize("settings", [{"beam": 2, "nbest": 2}, {"beam": 1, "no_repeat_ngram": 2}])
def test_kernels_equal_pytorch_operations(settings, on_device):
    """In the interpreter; three sentences in two slots."""
    model, sources = drawn(10, 3)
    config = DecodingConfig(max_len_a=0.0, max_len_b=3, batch_tokens=32, **settings)
    theirs = search_ids(model, sources, config, banned=[[7], [8, 9]])
    with backend("triton"):
        assert_same(search_ids(model, sources, config, banned=[[7], [8, 9]]), theirs)
    assert [kernels for _, _, kernels, _ in _of_models[model].engines] == [True]


def an_engine(model, slots=3) -> Engine:
    sizes = Sizes(slots, 4, 4, 32, 32, 2 * slots, VOCABULARY)
    return Engine(model, sizes, DecodingConfig(), CPU, kernels=False, banned=((5,), (6, 7, 8)), selects=True)


SAMPLING = {"sampling": True, "nbest": 4, "sampling_topk": 5}
STEPS = [{}, {"beam": 1}, {"no_repeat_ngram": 2}, SAMPLING, {"diverse_beam_groups": 2}]


@pytest.mark.parametrize("settings", STEPS)
def test_every_step_and_encoding_can_be_captured(settings, on_device, monkeypatch):
    """Each step makes the same calls at the same addresses as the one before, while sentences come and go."""
    monkeypatch.setattr(greedy, "top_k", partial(top_k._by_blocks, choose=top_k._first_of_equal))  # as on a GPU
    graphs_made = []

    def watched(*arguments):
        graphs_made.append(Watched(*arguments))
        return graphs_made[-1]

    config = DecodingConfig(max_len_b=5, batch_tokens=64, batch_invariant=False, **settings)  # of CPU products
    with mock.patch.object(engine, "Graphs", watched):
        search_ids(*drawn(1, 9), config, banned=[[7, 8]])
    (graphs,) = graphs_made
    assert len(graphs.runs[None]) > 12
    assert {key for key in graphs.runs if key is not None} <= {(1, 16), (2, 16), (4, 16)}


@pytest.mark.parametrize("most", [24, 33])
def test_learned_positions_limit_padding_and_output(most, on_device):
    """Padded sources and outputs stay within the positions, and the longest encoding can be captured."""
    model = model_of("fp32", VOCABULARY, 32, positional_encoding="learned", max_length=most)
    source, config = [*[7] * (most - 1), EOS], DecodingConfig(max_len_a=3.0, batch_invariant=False)
    with mock.patch.object(engine, "Graphs", Watched):
        (best,), *_ = search_ids(model, [source, [9, EOS], source], config)
    assert len(best.tokens) < most
    with pytest.raises(UserError, match="learned positions"):
        search_ids(model, [[7, *source]], config)


class Late(torch.Tensor):
    """Host buffer that is written only when an event recorded behind the copy is waited for."""

    started: ClassVar[list] = []
    arrived: ClassVar[int] = 0

    def copy_(self, source, non_blocking=False):
        Late.started.append((self.as_subclass(torch.Tensor), source.clone()))
        return self


class Event:
    """A CUDA event over the copies of Late."""

    behind = 0

    def record(self, *_):
        self.behind = len(Late.started)

    def synchronize(self):
        for place, value in Late.started[Late.arrived : self.behind]:
            place.copy_(value)
        Late.arrived = max(Late.arrived, self.behind)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("settings", [{}, {"beam": 1}, SAMPLING, {"diverse_beam_groups": 2}])
def test_the_host_reads_results_only_after_their_event(settings, on_device, monkeypatch):
    """Copies to the host complete as late as events allow, while slots and places are reused."""
    init = Engine.__init__
    model, sources = drawn(12, 30)
    config = DecodingConfig(max_len_b=6, batch_tokens=64, **settings)
    expected = search_ids(model, sources, config)
    monkeypatch.setattr(Late, "started", [])
    monkeypatch.setattr(Late, "arrived", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)

    def lagging(self, *arguments, **options):
        init(self, *arguments, **options)
        self._events = [Event(), Event()]

    monkeypatch.setattr(Engine, "__init__", lagging)
    monkeypatch.setattr(Engine, "_host", lambda _, x: torch.full_like(x, -7, device="cpu").as_subclass(Late))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert search_ids(model, sources, config) == expected
    assert len(Late.started) > 30


def test_an_interrupted_burst_leaves_nothing_behind(on_device):
    model, sources = drawn(3, 6)
    config = DecodingConfig(max_len_b=8)
    expected = search_ids(model, sources, config)
    steps = mock.Mock(side_effect=[*[None] * 5, KeyboardInterrupt])
    with mock.patch.object(Engine, "step", steps), pytest.raises(KeyboardInterrupt):
        search_ids(model, sources, config)
    assert search_ids(model, sources, config) == expected


def test_engines_are_cached_until_the_model_changes(on_device, monkeypatch):
    made = []
    init = Engine.__init__
    monkeypatch.setattr(
        Engine, "__init__", lambda self, *args, **kwargs: (made.append(self), init(self, *args, **kwargs))[1]
    )
    monkeypatch.setattr("fasttfm.models.stack.may_run", lambda: True)  # as on a GPU: prepared layers are cached
    (model, sources), config = drawn(4, 3), DecodingConfig(max_len_b=4)
    first = search_ids(model, sources, config)
    assert search_ids(model, sources, config) == first
    assert len(made) == 1
    with torch.no_grad():
        model.output.bias += torch.randn(VOCABULARY)  # in place, which a step sees
    changed = search_ids(model, sources, config)
    assert len(made) == 1
    assert changed != first
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert search_ids(model, sources, config) == changed
    assert len(made) == 2


def test_an_ensemble_is_searched_with_the_positions_of_the_moment(on_device):
    """In half precision, whose learned positions a step converts to float32."""
    fields = {"positional_encoding": "learned", "max_length": 64}
    model = Ensemble([model_of("bf16", VOCABULARY, 32, std=std, **fields) for std in (3.0, 2.0)])
    config, sources = DecodingConfig(max_len_b=4), sources_of(random.Random(4), 3)
    before = search_ids(model, sources, config)
    for each in model.models:
        each.target_positions.weight.data.normal_()
    after = search_ids(model, sources, config)
    assert before != after == search_ids(copy.deepcopy(model), sources, config)


@pytest.mark.parametrize("ensemble", [False, True])
def test_engines_are_freed_with_their_model(ensemble, on_device, monkeypatch):
    """At once, without garbage collection."""
    made, draw = [], random.Random(4)
    model = Ensemble([transformer(draw) for _ in range(2)]) if ensemble else transformer(draw)
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (made.append(weakref.ref(self)), step(self))[1])
    search_ids(model, [[5, EOS]], DecodingConfig(max_len_b=4))
    copy.deepcopy(model)
    gone = [weakref.ref(model), *made]
    gc.disable()
    try:
        del model
        assert {each() for each in gone} == {None}
    finally:
        gc.enable()


def test_threads_use_separate_engines(on_device):
    """Even with one model at the same time, and with any options."""
    model, sources = drawn(4, 5)
    configs = [DecodingConfig(max_len_b=4, beam=beam, batch_tokens=64) for beam in (1, 2, 3)]
    expected = [search_ids(model, sources, config) for config in configs]

    def searches(seed):
        order = random.Random(seed).choices(range(3), k=8)
        return all(search_ids(model, sources, configs[number]) == expected[number] for number in order)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert all(threads.map(searches, range(3)))
    finally:
        sys.setswitchinterval(switch)


def test_only_plain_models_are_searched_on_the_device(on_device):
    model = transformer(random.Random(2))
    with inference(model):
        assert not takes(model, DecodingConfig()), "a CPU has its own engine"
        with mock.patch("fasttfm.search.device.search.use_triton", return_value=True):
            assert takes(model, DecodingConfig())
            handle = model.decoder.layers[0].linear1.register_forward_hook(lambda *_: None)
            assert not takes(model, DecodingConfig())
            handle.remove()
            for module in (model.encoder.layers[0], model.source_embedding):  # a graph would not call their hooks
                handle = module.register_forward_hook(lambda *_: None)
                assert not takes(model, DecodingConfig())
                handle.remove()
            assert takes(model, DecodingConfig())
            model.start_cache = None  # a model with its own steps
            assert not takes(model, DecodingConfig())


def test_the_host_prepares_a_burst_in_few_calls(monkeypatch):
    """Besides those that replay a step."""
    draw = random.Random(1)
    with inference(model := transformer(draw)):
        searched = an_engine(model, slots=16)
        monkeypatch.setattr(searched, "step", int)
        monkeypatch.setattr(searched, "_remember", lambda *_: None)

        task = Task(Waiting(0, [5, 6, 7, EOS]), DecodingConfig(), 20, None)

        def burst(sentences):
            searched.reset()
            searched.waiting.extend([task] * sentences)
            searched.advance()

        assert function_calls(partial(burst, 1)) <= 150
        assert function_calls(partial(burst, 16)) <= 300
        assert function_calls(searched.advance) <= 20


def test_insufficient_memory_is_reported_before_allocation(on_device, monkeypatch):
    model, sources = drawn(7, 9)
    config = DecodingConfig(batch_tokens=128)
    needed = {
        slots: capacity.needed_bytes(model, Sizes(slots, 4, 4, 64, 32, 2 * slots, VOCABULARY)) for slots in (3, 4, 8)
    }
    monkeypatch.setattr(capacity, "available_bytes", lambda: needed[4])
    with pytest.raises(
        UserError, match=r"8 sentences at once with 4 hypotheses .* free on cpu: --batch-tokens 64 fits"
    ):
        search_ids(model, sources, config)
    monkeypatch.setattr(capacity, "available_bytes", lambda: 1000)
    with pytest.raises(UserError, match="give a smaller --beam or --max-len-b"):
        search_ids(model, sources, config)


def test_idle_engines_are_freed_when_memory_is_short(on_device, monkeypatch):
    """Those of another model too."""
    draw = random.Random(7)
    idle, model, sources = transformer(draw), transformer(draw), sources_of(draw, 3)
    expected = search_ids(idle, sources, config := DecodingConfig())
    monkeypatch.setattr(capacity, "available_bytes", lambda: 1000 if _of_models[idle].engines else 1 << 30)
    search_ids(model, sources, config)
    assert not _of_models[idle].engines
    assert search_ids(idle, sources, config) == expected


def test_memory_cached_by_pytorch_counts_as_free(monkeypatch):
    for name, answer in {"mem_get_info": (7, 900), "memory_reserved": 50, "memory_allocated": 20}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert capacity._free_on_gpu(torch.device("cuda", 1)) == 7 + 50 - 20


def test_idle_slots_touch_only_the_dummy_place():
    state = State(Sizes(2, 3, 3, 8, 8, 4, VOCABULARY), CPU)
    assert (state.finished == NOTHING).all()
    model = transformer(random.Random(9))
    with torch.inference_mode():
        searched = an_engine(model)
        before = [
            each[:-1].clone() for each in (searched.state.tokens, searched.state.found_scores, searched.state.finished)
        ]
        for _ in range(3):
            searched.step()
        after = [each[:-1] for each in (searched.state.tokens, searched.state.found_scores, searched.state.finished)]
        assert all(map(torch.equal, before, after))
        assert (searched.state.sentence == searched.sizes.places).all()
