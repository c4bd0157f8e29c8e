"""The compiled loops of a decoding step against the reference; rows are independent."""

import pytest
import torch

from fasttfm import reference
from fasttfm.cpu import step_passes
from fasttfm.functional.feed_forward import ACTIVATIONS
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, score_ids, search_ids

pytest.importorskip("numba")

array, TEAM, NOT_INT8 = step_passes.array, step_passes.team, (None, None)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda each: str(each)[6:])
compiled = pytest.mark.parametrize(
    "dtype", [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.whole)], ids=lambda each: str(each)[6:]
)
"""A loop takes seconds to compile for a dtype."""


def close(actual, expected, factor=1):
    bound = BOUND[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=factor * bound)


def attend_to_ancestors(joint, keys, values, *tables):
    """The loop's heads (R, d); tables: ancestors, slots and positions."""
    out, inputs = joint.new_empty(len(joint), joint.shape[1] // 3), map(array, (keys, values, *tables))
    step_passes.loops().attend_to_ancestors(TEAM(), array(joint), *NOT_INT8, *inputs, array(out), *NOT_INT8)
    return out


def attend_to_memory(query, *inputs):
    """The loop's heads (R, d); inputs: keys, values, sentences and lengths."""
    out = torch.empty_like(query)
    step_passes.loops().attend_to_memory(TEAM(), array(query), *NOT_INT8, *map(array, inputs), array(out), *NOT_INT8)
    return out


def add_layer_norm(x, residual, weight, bias, eps):
    """The loop's y and s."""
    outputs, inputs = torch.empty(2, *x.shape, dtype=x.dtype).unbind(), map(array, (residual, weight, bias))
    loop = step_passes.loops().add_layer_norm
    loop(TEAM(), array(x), *NOT_INT8, *inputs, eps, len(x), *map(array, outputs), *NOT_INT8)
    return outputs


def test_the_loops_are_usable_with_numba_for_cpu_tensors_of_their_dtypes():
    assert step_passes.usable()
    assert not step_passes.takes(torch.zeros(1, dtype=torch.float64))
    assert not step_passes.takes(torch.zeros(1, device="meta"))


@compiled
@pytest.mark.parametrize(("heads", "size", "position"), [(2, 16, 0), (3, 5, 1), (8, 64, 7), (1, 7, 30)])
def test_attention_to_ancestors(dtype, heads, size, position):
    rows, places, capacity, width = 6, 9, 32, heads * size
    joint = torch.randn(rows, 3 * width).to(dtype)
    keys, values = torch.randn(2, places, capacity, heads, size).to(dtype).unbind(0)
    ancestors = torch.randint(0, places, (rows, capacity)).int()
    slots = torch.randperm(places)[:rows].int()
    query, key, value = joint.view(rows, 3, heads, size).unbind(1)
    by_row = ancestors[:, :position].long()
    seen = torch.arange(position)
    all_keys = torch.cat([keys[by_row, seen], key[:, None]], 1).transpose(1, 2)
    all_values = torch.cat([values[by_row, seen], value[:, None]], 1).transpose(1, 2)
    expected = reference.attention(query[:, :, None].double(), all_keys.double(), all_values.double())[0]

    positions = torch.full((rows,), position)
    found = attend_to_ancestors(joint, keys, values, ancestors, slots, positions)
    close(found, expected.transpose(1, 2).reshape(rows, width))
    assert torch.equal(keys[slots.long(), position], key)
    assert torch.equal(values[slots.long(), position], value)
    alone = [
        attend_to_ancestors(joint[r, None], keys, values, ancestors[r, None], slots[r, None], positions[:1])
        for r in range(rows)
    ]
    assert torch.equal(found, torch.cat(alone))


@compiled
@pytest.mark.parametrize(("heads", "size"), [(2, 16), (3, 5), (8, 64)])
def test_cross_attention_reads_no_padding(dtype, heads, size):
    lengths, sentences = torch.tensor([1, 11, 4]), torch.tensor([2, 0, 1, 1, 2]).int()
    query = torch.randn(5, heads * size).to(dtype)
    keys, values = torch.randn(2, 3, heads, 11, size).to(dtype).unbind(0)
    keys[0, :, 1:], values[2, :, 4:] = torch.nan, torch.nan  # padding is not read
    clean = (x.double()[sentences.long()].nan_to_num() for x in (keys, values))
    expected = reference.attention(
        query.view(5, heads, 1, size).double(), *clean, key_lengths=lengths[sentences.long()]
    )[0]
    found = attend_to_memory(query, keys, values, sentences, lengths)
    close(found, expected.reshape(5, -1))
    longer = (torch.nn.functional.pad(x, (0, 0, 0, 9)) for x in (keys, values))
    assert torch.equal(attend_to_memory(query, *longer, sentences, lengths), found)


@dtypes
@pytest.mark.parametrize("width", [3, 48, 512])
def test_sum_and_layer_norm(dtype, width):
    x, residual = torch.randn(2, 7, width).to(dtype).unbind(0)
    weight, bias = torch.randn(2, width).to(dtype).unbind(0)
    y, s = add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(s, residual + x), "rounded as PyTorch rounds"
    expected = torch.nn.functional.layer_norm(s.double(), (width,), weight.double(), bias.double(), 1e-5)
    close(y, expected, 3)
    alone = [add_layer_norm(a[None], b[None], weight, bias, 1e-5)[0] for a, b in zip(x, residual)]
    assert torch.equal(y, torch.cat(alone))


@dtypes
def test_without_eps_a_constant_row_is_nan_as_in_pytorch(dtype):
    x, ones = torch.stack([torch.zeros(8), torch.arange(8.0)]).to(dtype), torch.ones(8).to(dtype)
    y, _ = add_layer_norm(x, torch.zeros_like(x), ones, ones, 0.0)
    assert y.isnan().all(1).tolist() == [True, False]
    assert torch.nn.functional.layer_norm(x[:1], (8,), ones, ones, 0.0).isnan().all()


def test_a_numba_that_does_not_work_is_reported(monkeypatch):
    def fails():
        raise RuntimeError("no locator available")

    monkeypatch.setattr(step_passes, "loops", fails)
    with pytest.warns(RuntimeWarning, match="no locator available.*set NUMBA_CACHE_DIR"):
        assert not step_passes.usable.__wrapped__()


@dtypes
def test_nan_and_inf_propagate(dtype):
    x, ones = torch.zeros(2, 8).to(dtype), torch.ones(8).to(dtype)
    x[0, 3], x[1, 2] = torch.nan, torch.inf
    y, s = add_layer_norm(x, torch.zeros_like(x), ones, ones, 1e-5)
    assert s[0].isnan().sum() == 1
    assert s[1, 2] == torch.inf
    assert y.isnan().all()
    for bad in (torch.nan, torch.inf):
        keys, index, lengths = torch.ones(1, 1, 3, 8).to(dtype), torch.tensor([0]).int(), torch.tensor([3])
        keys[0, 0, 1] = bad
        assert attend_to_memory(x[1:].nan_to_num(1), keys, keys, index, lengths).isnan().all()


@compiled
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_activations(dtype, name):
    x = torch.cat([torch.linspace(-12, 12, 1021), torch.tensor([torch.nan, torch.inf])]).to(dtype).repeat(5, 1)
    found, loops = x.clone(), step_passes.loops()
    loops.activate(TEAM(), array(found), loops.ACTIVATIONS[name])
    assert found[:, 1021].isnan().all()
    assert (found[:, 1022] == torch.inf).all()
    close(found[:, :1021], ACTIVATIONS[name](x[:, :1021].double()), 0.1)


@pytest.mark.sample(4)
@compiled
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_a_search_matches_one_without_the_loops(monkeypatch, dtype, norm_first, beam, activation):
    config = TransformerConfig(
        vocab_size=90, d_model=32, heads=4, d_ff=64, encoder_layers=1, decoder_layers=2, norm_first=norm_first,
        final_norm=norm_first, activation=activation,
    )  # fmt: skip
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    model.to(dtype)
    sources = [[*range(4, 4 + count), 3] for count in (1, 3, 8, 20, 40, 41)]
    settings = DecodingConfig(beam=beam, nbest=beam, max_len_b=30)
    found = search_ids(model, sources, settings)
    monkeypatch.setattr(step_passes, "usable", lambda: False)
    expected = search_ids(model, sources, settings)
    if dtype == torch.float32:
        tokens, expected_tokens = ([[each.tokens for each in some] for some in all_] for all_ in (found, expected))
        assert tokens == expected_tokens
    pairs = [(source, each) for source, some in zip(sources, found, strict=True) for each in some]
    scores = score_ids(model, [source for source, _ in pairs], [each.tokens for _, each in pairs])
    relative, absolute = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (0.05, 0.3), torch.float16: (0.01, 0.05)}[dtype]
    assert [each.log_probability for _, each in pairs] == pytest.approx(scores, rel=relative, abs=absolute)
    assert len({tuple(some[0].tokens) for some in found}) > 2
    assert max(len(some[0].tokens) for some in found) > 32, "longer than the initial cache"
