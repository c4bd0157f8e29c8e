"""Updates in CUDA graphs: the bits of eager ones, and nothing that a replay would miss."""

import contextlib
from functools import partial

import pytest
import torch
from replayable import on_a_chip

from fasttfm.data.batches import collate
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.system.graphs import Graphs
from fasttfm.training import graphs
from fasttfm.training.graphs import run_on_batch
from fasttfm.training.workers import Workers
from ptx_check.chips import CHIPS
from ptx_check.cuda import Answers

from .test_updates import assert_same, make, state

RECIPES = {
    "adam": {"ema_decay": 0.9},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "decayed": "matrices", "rates": ("encoder.*=0.5",)},
    "muon": {"optimizer": "muon", "weight_decay": 0.1, "precision": "bf16"},
    "accumulated": {"precision": "bf16", "update_freq": 2, "clip_norm": 1.0},
    "fp16": {"precision": "fp16", "clip_norm": 1.0},
    "checkpointed": {"checkpoint_activations": True, "schedule": "cosine", "max_update": 1000},
    "sampled": {"subword_sampling": 0.2, "norm_first": True, "final_norm": True},
}


@pytest.fixture
def on_cpu(monkeypatch):
    """Capture updates on a CPU, as on a GPU."""
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})


@pytest.mark.sample(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_update_has_the_bits_of_an_ordinary_one(tiny_data, tiny_config, recipe, request):
    """With dropout, over the end of an epoch, so that shapes recur with other tokens."""
    config = tiny_config(**RECIPES[recipe])
    ordinary = make(tiny_data, config)
    request.getfixturevalue("on_cpu")
    fixed = make(tiny_data, config)
    fixed.rehearse()
    for _ in range(2 * len(ordinary.batches) // ordinary.config.update_freq):
        assert ordinary.perform()
        assert fixed.perform()
        assert_same(state(ordinary), state(fixed))
    assert fixed.position.epoch >= 1
    assert 1 < len(fixed._graphs._entries) < 2 * len(ordinary.batches)


def of_two_shapes(updates):
    """Alternate two batches of one shape, each followed by one of another shape."""
    order = updates.batches.epoch(0)
    shapes = [updates.batches.batch(indices).shape for indices in order]
    shape = max(set(shapes), key=shapes.count)
    one, two = [indices for indices, each in zip(order, shapes) if each == shape][:2]
    other = next(indices for indices, each in zip(order, shapes) if each != shape)
    updates.batches.epoch = lambda epoch: [one, other, two, other] * 2
    return updates


@pytest.mark.sample(4)
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_replay_would_do_what_every_update_does(tiny_data, tiny_config, recipe, route):
    """Updates make the same calls with other tokens, lengths and learning rate, and after the work between updates."""
    with on_a_chip(route) as device:
        updates = of_two_shapes(make(tiny_data, tiny_config(**RECIPES[recipe]), device))
        for _ in range(8 // updates.config.update_freq):
            updates.perform()
            updates.arrivals.take()
            updates.numbers()
            updates.forget_sums()
            with updates.optimization.averaged():
                updates.tensors()
    runs = updates._graphs.runs
    assert set(map(len, runs.values())) == {4}
    kernels = [name for name, *_ in next(iter(runs.values()))[-1].made if "." not in name]
    assert bool(kernels) == (route == "triton")


def of_length(tokens):
    return collate([[5] * tokens], [[6] * tokens])


def test_a_shape_is_run_then_captured_and_replayed(monkeypatch):
    """For two shapes and calls without a batch, on a device that records its calls."""
    told = []

    class Graph:
        def replay(self):
            told.append("replay")

        def pool(self):
            return "pool"

    @contextlib.contextmanager
    def capturing(graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local", "other threads go on"
        told.append(f"capture, {pool}")
        yield

    def run(batch):
        told.append(None if batch is None else batch.shape[1])

    def failing(batch):
        raise RuntimeError("operation not permitted when stream is capturing")

    with Answers(CHIPS["sm_90"]):
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capturing)
        held = partial(run_on_batch, Graphs(torch.device("cuda"), "an update", "give --no-cuda-graph"))
        for batch in (of_length(1), of_length(2), None, of_length(1), None, of_length(2), of_length(1)):
            held(run, batch)
        assert told[:3] == [2, 3, None]
        assert told[3:] == [
            *("capture, None", 2, "replay", "capture, pool", None, "replay", "capture, pool", 3, "replay", "replay")
        ]
        held(run, of_length(3))
        with pytest.raises(UserError, match=r"not permitted when stream is capturing\): give --no-cuda-graph"):
            held(failing, of_length(3))


def test_why_updates_cannot_be_captured(tiny_data, tiny_config, on_cpu):
    updates = make(tiny_data, tiny_config())
    given = {"module": updates.module, "batches": updates.batches, "config": updates.config, "workers": Workers()}
    two = Workers()
    two.size = 2
    hooked = Transformer(updates.model.config)
    hooked.encoder.layers[0].register_forward_hook(lambda *_: None)
    for changes, reason in (
        ({}, None),
        ({"config": tiny_config(packed=True).training}, "packed"),
        ({"workers": two}, "workers"),
        ({"module": hooked}, "hooks"),
        ({"batches": object()}, "ever new shapes"),
    ):
        told = graphs.why_uncaptured(**{**given, **changes})
        assert told is None if reason is None else reason in told
