"""The device search on a GPU: against the CPU's, from CUDA graphs, with slots reused by later sentences."""

import random
from unittest import mock

import pytest

from fasttfm.search import DecodingConfig, search_ids
from fasttfm.search.device.search import _of_models
from fasttfm.system.graphs import Graphs
from tests.search import device_cases, small_models


def assert_as_on_a_cpu(model, device, sources, config, **given):
    """Runs three times: eager, captured, replayed."""
    expected = search_ids(model, sources, config, **given)
    model.to(device)
    for _ in range(3):
        device_cases.assert_same(search_ids(model, sources, config, **given), expected)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", device_cases.KINDS)
def test_results_equal_those_of_a_cpu(kind, seed, device, ieee):
    model, sources, config, given = device_cases.a_case(kind, seed)
    assert_as_on_a_cpu(model, device, sources, config, **given)


@pytest.mark.parametrize("beam", [1, 4, 8, 16, 20])
def test_vocabularies_of_several_shares(beam, device, ieee):
    """The selection kernels support beams up to 16."""
    model = small_models.model_of("fp32", 9_000, std=1.0)
    sources, config = small_models.sources_of(9_000, 6), DecodingConfig(beam=beam, nbest=beam, max_len_b=8)
    assert_as_on_a_cpu(model, device, sources, config)


def test_graphs_stay_valid_while_slots_are_reused(device, ieee):
    draw = random.Random(1)
    model, sources = device_cases.transformer(draw), device_cases.sources_of(draw, 40)
    with mock.patch.object(Graphs, "_captured", autospec=True, side_effect=Graphs._captured) as captured:
        assert_as_on_a_cpu(model, device, sources, DecodingConfig(max_len_b=12, batch_tokens=32))
        search_ids(model, sources[::-1], DecodingConfig(max_len_b=12, batch_tokens=32, alpha=1.0))
    (engine,) = _of_models[model].engines.values()
    assert engine.sizes.slots == 2
    assert captured.call_count <= 3, "a step, and encoders of one sentence and of two"
