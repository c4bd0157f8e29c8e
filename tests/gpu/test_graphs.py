"""CUDA graphs: each replay draws a new dropout mask, and whole training steps replay."""

import numpy as np
import pytest
import torch

from fasttfm import functional as F
from fasttfm import nn
from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import ParallelTokens
from fasttfm.functional import backend
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.training.updates import Updates


def captured(step):
    """A graph of step() and its result, captured after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@pytest.mark.parametrize("operator", ["attention", "residual_layer_norm", "feed_forward", "embed"])
def test_each_replay_draws_a_new_mask(operator, device):
    ones = torch.ones(64, 64, device=device)
    eye = torch.eye(64, device=device)

    def step():
        if operator == "attention":
            x = torch.ones(1, 1, 64, 64, device=device)
            return F.attention(x, x, eye[None, None], dropout_p=0.5)
        if operator == "residual_layer_norm":
            return F.residual_layer_norm(ones, ones, None, None, dropout_p=0.5)[1]
        if operator == "feed_forward":
            return F.feed_forward(ones, eye, None, eye, None, dropout_p=0.5)
        tokens = torch.zeros(1, 64, dtype=torch.int64, device=device)
        return F.embed(tokens, ones, None, dropout_p=0.5)

    with torch.no_grad(), backend("triton"):
        graph, result = captured(step)
        seen = []
        for _ in range(3):
            graph.replay()
            seen.append(result.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_decoding_steps_with_a_cache_replay(device):
    """Each step reorders the rows; keys and values stay at their addresses."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
    model, cache = nn.TransformerDecoder(layer, 2).to(device).eval(), nn.DecoderCache(16)
    memory = torch.randn(1, 5, 64, device=device).expand(3, 5, 64)
    past, new = torch.randn(2, 3, 1, 64, device=device)
    rows = torch.arange(3, device=device)

    def step():
        cache.reorder(rows, memory=False)
        return model(new, memory, cache=cache)

    with torch.no_grad(), backend("triton"):
        model(past, memory, cache=cache)
        graph, output = captured(step)
        past = torch.cat([past, *[new] * 3], 1)
        for chosen in ([2, 0, 1], [1, 1, 0], [0, 2, 2]):
            rows.copy_(torch.tensor(chosen))
            new.normal_()
            graph.replay()
            past = torch.cat([past[rows], new], 1)
            full = model(past, memory, tgt_is_causal=True)[:, -1:]
            torch.testing.assert_close(output, full, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "changes", [{}, {"update_freq": 2}, {"optimizer": "muon", "weight_decay": 0.1, "ema_decay": 0.9}]
)
def test_updates_from_graphs_equal_eager_ones(device, changes):
    """fasttfm train captures every shape once and gives the same weights as eager launches."""
    rng = np.random.default_rng(0)
    sentences = [rng.integers(4, 64, length).tolist() for length in rng.integers(2, 20, 200)]
    pairs = ParallelTokens.from_lists(sentences, sentences[::-1])
    config = TransformerConfig(vocab_size=64, d_model=64, heads=2, d_ff=128, encoder_layers=2, decoder_layers=2)
    weights = []
    for cuda_graph in (False, True):
        torch.manual_seed(0)
        model = Transformer(config).to(device).train()
        given = {"precision": "bf16", "clip_norm": 1.0, "warmup_updates": 5, **changes}
        recipe = TrainingConfig(cuda_graph=cuda_graph, **given)
        updates = Updates(model, TokenBatches(pairs, 256, 1), recipe, device)
        updates.rehearse()
        for _ in range(4 * len(updates.batches) // recipe.update_freq):
            updates.perform()
            updates.arrivals.take()
        updates.arrivals.take(wait=True)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        assert updates.skipped == []
        if cuda_graph:
            assert all(held.graph is not None for held in updates._graphs._entries.values())
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
