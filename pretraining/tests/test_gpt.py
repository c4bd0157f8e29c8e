"""GPT: its size and initialisation, its cached step, and documents in a row that do not see each other."""

import math

import pytest
import torch
from torch import nn

from fasttfm.functional import backend
from fasttfm.models.cache import DecoderCache
from fasttfm.models.packing import Packing
from fasttfm_pretraining.config.gpt import GPTConfig
from fasttfm_pretraining.data.documents import Documents, RowBatches
from fasttfm_pretraining.models.gpt import GPT

CONFIG = {"vocab_size": 31, "d_model": 16, "heads": 2, "d_ff": 32, "layers": 2, "max_length": 24, "dropout": 0.0}
DOCUMENTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19], [20]]


def gpt(**changes):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**CONFIG, "attention_dropout": 0.0, **changes}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def packed_batch(row_length=20, documents=DOCUMENTS):
    batches = RowBatches(Documents.from_lists(documents, 3), row_length, 2 * row_length)
    return batches.batch(batches.largest())


def test_gpt2_small_has_its_parameters():
    with torch.device("meta"):
        model = GPT.from_preset("gpt2-small", vocab_size=50257)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_gpt2_scales_what_ends_a_sub_layer_by_depth_and_gpt1_does_not():
    torch.manual_seed(0)
    for norm_first, expected in ((True, 0.02 / math.sqrt(16)), (False, 0.02)):
        model = GPT(GPTConfig(vocab_size=64, d_model=128, heads=2, d_ff=512, layers=8, norm_first=norm_first))
        for layer in model.decoder.layers:
            for last in (layer.self_attn.out_proj, layer.linear2):
                assert last.weight.std().item() == pytest.approx(expected, rel=0.05)
            assert layer.self_attn.in_proj_weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert not layer.linear1.bias.any()
        assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert (model.decoder.norm is not None) == norm_first


@pytest.mark.sample(2)
@pytest.mark.parametrize("route", ["triton", "torch"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_cached_step_equals_the_full_pass(norm_first, route):
    """Kernels take it as calls that are prepared once."""
    model = gpt(norm_first=norm_first).eval()
    tokens = torch.randint(0, 31, (3, 12))
    whole = model(tokens)
    cache = DecoderCache()
    with backend(route):
        torch.testing.assert_close(model.step(tokens[:, :5], cache), whole[:, 4], rtol=1e-4, atol=1e-4)
        for position in range(5, 12):
            step = model.step(tokens[:, position : position + 1], cache)
            torch.testing.assert_close(step, whole[:, position], rtol=1e-4, atol=1e-4)
        assert (cache._step is not None) == (route == "triton")
        for module in (model.embedding, model.positions):  # called then, where their tables were read
            module.register_forward_hook(lambda *_: None)
        cache = DecoderCache()
        model.step(tokens[:, :5], cache)
        torch.testing.assert_close(model.step(tokens[:, 5:], cache), whole[:, -1], rtol=1e-4, atol=1e-4)


def test_the_loss_of_packed_documents_is_that_of_each_alone():
    model = gpt().double()
    batch = packed_batch()
    assert not batch.is_even
    loss, nll = model.batch_loss(batch)
    loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    position = 0
    for size in batch.lengths.tolist():
        part = slice(position, position + size)
        logits = model(batch.tokens[:, part])[0]
        total = total + nn.functional.cross_entropy(logits, batch.targets[0, part], reduction="sum")
        position += size
    total.backward()
    torch.testing.assert_close(loss, total)
    torch.testing.assert_close(nll, total)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, msg=name)


def test_even_rows_and_packed_ones_give_the_same_loss():
    model = gpt().double()
    batch = packed_batch(5, [list(range(4, 23))])
    assert batch.is_even
    loss, _ = model.batch_loss(batch)
    packing = Packing.from_lengths(batch.lengths, batch.longest, batch.target_tokens)
    torch.testing.assert_close(loss, model(batch.tokens, packing, targets=batch.targets)[0])


def test_wrong_values_and_too_long_rows_are_refused():
    for changes in ({"layers": 0}, {"heads": 3}, {"dropout": 2.0}, {"activation": "tanh"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            GPTConfig(**{**CONFIG, **changes})
    with pytest.raises(ValueError, match="24"):
        gpt()(torch.zeros(1, 25, dtype=torch.int64))
