"""Models that are not plain: hooked, pruned, wrapped, quantized, on the meta device, loaded by assignment."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from fasttfm.search.decoder import decoder_of

from . import test_layer_node
from .test_layer_node import batch_of, loss_and_gradients

INNER = [
    "encoder", "encoder.layers.1", "encoder.layers.0.linear1", "encoder.layers.0.linear2", "encoder.layers.1.norm1",
    "encoder.layers.1.self_attn", "encoder.layers.1.self_attn.out_proj", "decoder.layers.0.multihead_attn",
    "decoder.layers.0.multihead_attn.out_proj", "decoder.layers.1.norm3", "target_embedding", "output",
]  # fmt: skip
tiny = partial(test_layer_node.tiny, dropout=0.0)


def step(model, route="torch"):
    return loss_and_gradients(model, batch_of(), route)


# --------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.sample(1)
@pytest.mark.parametrize("route", ["torch", "triton"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_every_hook_fires_gets_tensors_and_changes_no_result(norm_first, route):
    model = tiny(norm_first=norm_first, final_norm=norm_first)
    wanted = step(model, route)
    seen = []
    for name in INNER:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        model.get_submodule(name).register_full_backward_hook(lambda *_, name=name: seen.append("grad " + name))
    shapes = []
    model.encoder.layers[1].register_forward_hook(lambda _, given, y: shapes.extend([given[0].shape, y.shape]))
    loss, gradients = step(model, route)
    torch.testing.assert_close(loss, wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, wanted[1], rtol=1e-4, atol=1e-4)
    assert set(seen) == {*INNER, *("grad " + name for name in INNER)}
    assert shapes == [(3, 7, 16)] * 2


@pytest.mark.parametrize("name", [*INNER, "target_positions"])
def test_a_hooks_result_replaces_the_output(name):
    options = {"positional_encoding": "learned", "max_length": 8} if name == "target_positions" else {}
    model = tiny(**options)
    wanted = step(model)[0]
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: output.flip(-1))
    assert abs(step(model)[0] - wanted) > 1e-4


def test_hooks_fire_in_a_search_too():
    model, seen = tiny().eval(), []
    for name in INNER[2:]:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    with torch.no_grad():
        source, target, *_ = batch_of()
        cache = decoder_of(model).start_cache(model.encode(source), max_length=2)
        decoder_of(model).step(target[:, 0], cache)
    assert set(seen) == set(INNER[2:])


# ----------------------------------------------------------------------------------------- modules of another class


def near(actual, expected):
    """Whether the error is at most a tenth of the values."""
    return (actual - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dynamically_quantised_model_translates():
    model = tiny().eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert type(quantised.encoder.layers[0].linear1) is not nn.Linear
    source, target, _, lengths, _ = batch_of()
    with torch.no_grad():
        logits = model(source, target, lengths)
        assert near(quantised(source, target, lengths), logits)
        cache = decoder_of(quantised).start_cache(quantised.encode(source, lengths), lengths, max_length=3)
        assert near(decoder_of(quantised).step(target[:, 0], cache), logits[:, 0])
        assert not near(logits[:, 1], logits[:, 0])


# ------------------------------------------------------------------------------- the meta device, and state dicts


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_from_the_meta_device_has_its_positions(assign):
    wanted = tiny().eval()
    with torch.device("meta"):
        model = tiny().eval()
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(wanted.state_dict(), assign=assign)
    source, target, *_ = batch_of()
    assert torch.equal(model(source, target), wanted(source, target))


def test_a_position_table_keeps_its_precision_when_it_grows():
    model = tiny(max_length=4).double()
    model(*batch_of()[:2])
    assert model.source_positions.table.dtype == torch.float64
    assert model.source_positions.table.shape[0] >= 7


@pytest.mark.parametrize("shared", ["all", "decoder", "none"])
def test_shared_tables_stay_shared_when_a_state_dict_is_assigned(shared):
    model = tiny(share_embeddings=shared)
    model.load_state_dict(copy.deepcopy(tiny(share_embeddings=shared).state_dict()), assign=True)
    assert (model.output.weight is model.target_embedding.weight) == (shared != "none")
    assert (model.source_embedding.weight is model.target_embedding.weight) == (shared == "all")
    wanted = sum(p.numel() for p in tiny(share_embeddings=shared).parameters())
    assert sum(p.numel() for p in model.parameters()) == wanted


def test_torchscript_is_refused_with_a_remedy():
    with pytest.raises(RuntimeError, match=r"torch\.compile and torch\.export"):
        torch.jit.script(tiny())
