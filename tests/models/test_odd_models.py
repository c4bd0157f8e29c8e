"""Models that are not plain: hooked, on the meta device, loaded by assignment."""

import copy
from functools import partial

import pytest
import torch

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


@pytest.mark.parametrize("shared", ["all", "decoder", "none"])
def test_shared_tables_stay_shared_when_a_state_dict_is_assigned(shared):
    model = tiny(share_embeddings=shared)
    model.load_state_dict(copy.deepcopy(tiny(share_embeddings=shared).state_dict()), assign=True)
    assert (model.output.weight is model.target_embedding.weight) == (shared != "none")
    assert (model.source_embedding.weight is model.target_embedding.weight) == (shared == "all")
    wanted = sum(p.numel() for p in tiny(share_embeddings=shared).parameters())
    assert sum(p.numel() for p in model.parameters()) == wanted
