"""Sharded training (FSDP2): the weights of unsharded training, and full checkpoints."""

import os

import pytest
import torch

from fasttfm.store.checkpoint import read_state
from fasttfm.store.run_log import read_log
from fasttfm.store.steps import resolve_checkpoint, saved_steps

from .runs import assert_same_weights
from .test_workers import assert_close
from .tiny import words

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

RECIPE = {"encoder_layers": 2, "decoder_layers": 2, "adam_eps": 1e-4, "clip_norm": 1.0}
RECIPE |= {"update_freq": 3, "max_update": 6}
RECIPE |= {"save_interval_updates": 3, "valid_interval_updates": 3, "d_ff": 63}  # 63: parts of different sizes


@pytest.mark.whole
def test_sharded_and_whole_models_end_in_the_same_weights(run_ranks, tiny_data, tmp_path):
    """With dropout (masks depend on the rank, rows are the same either way), EMA, clipping and batches without rows for
    some rank. GELU, because rounding of a ReLU's input near zero changes whole gradients."""
    changes = {**RECIPE, "activation": "gelu", "ema_decay": 0.9, "average_last": 2}
    whole, parts, again, fewer, other = (tmp_path / name for name in ("whole", "parts", "again", "fewer", "other"))
    statuses, stderr = run_ranks(
        {"size": 2, "words": words(tiny_data, whole, **changes)},
        {"size": 2, "words": words(tiny_data, parts, shard=True, checkpoint_activations=True, **changes)},
        {"size": 2, "words": words(tiny_data, again, shard=True, **{**changes, "max_update": 3})},
        {"size": 2, "words": words(tiny_data, again, shard=True, **changes)},
        {"size": 2, "words": words(tiny_data, other, **{**changes, "max_update": 3})},
        {"size": 2, "words": words(tiny_data, other, shard=True, **changes)},
        {"size": 2, "words": words(tiny_data, fewer, shard=True, **{**changes, "max_update": 3})},
        {"size": 1, "words": words(tiny_data, fewer, **changes)},
    )
    assert statuses == [[0, 0]] * 7 + [[0]], stderr
    assert_close(whole, parts)
    assert_close(whole, other)
    assert_same_weights(parts, again)
    assert saved_steps(fewer) == [3, 6]
    ours, theirs = (read_state(resolve_checkpoint(model, "last")) for model in (whole, parts))
    assert ours.tensors.keys() == theirs.tensors.keys()
    torch.testing.assert_close(theirs.tensors, ours.tensors, rtol=1e-3, atol=2e-5)
    for one, two in zip(read_log(whole), read_log(parts), strict=True):
        assert one["nll"] == pytest.approx(two["nll"], rel=1e-4)


def test_with_one_batch_per_update_sharded_training_has_the_same_bits(run_ranks, tiny_data, tmp_path):
    """With two ranks and without clipping nothing is summed in another order."""
    changes = {**RECIPE, "update_freq": 1, "clip_norm": 0.0, "valid_interval_updates": 0, "dropout": 0.1}
    runs = [
        {"size": 2, "words": words(tiny_data, tmp_path / name, shard=name == "parts", **changes)}
        for name in ("whole", "parts")
    ]
    statuses, stderr = run_ranks(*runs)
    assert statuses == [[0, 0]] * 2, stderr
    assert "Warning" not in stderr
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
