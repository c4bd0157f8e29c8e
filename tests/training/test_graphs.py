"""Passes from fixed addresses, which a CUDA graph can hold: the bits of ordinary ones, and nothing read by the host."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fasttfm.data.batches import TokenBatches
from fasttfm.errors import UserError
from fasttfm.training.updates import Updates
from fasttfm.training.workers import Workers

from .test_updates import CPU, assert_same, make, state

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


class NoReads(TorchDispatchMode):
    """Raises where a value of a tensor comes to the host, which cannot be captured."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in _READS, f"{function} reads a value"
        return function(*args, **(kwargs or {}))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [{"precision": "bf16", "update_freq": 2, "clip_norm": 1.0}, {"ema_decay": 0.9, "subword_sampling": 0.2}],
    ids=["accumulated", "sampled"],
)
def test_every_update_has_the_bits_of_an_ordinary_one(tiny_data, tiny_config, changes):
    """Dropout on; over the end of an epoch, so that shapes come again with other tokens."""
    ordinary = make(tiny_data, tiny_config(**changes))
    fixed = make(tiny_data, tiny_config(cuda_graph=True, **changes))
    fixed.rehearse()
    for _ in range(2 * len(ordinary.batches) // ordinary.config.update_freq):
        assert ordinary.perform()
        assert fixed.perform()
        assert_same(state(ordinary), state(fixed))
    assert fixed.position.epoch >= 1
    assert len(fixed._graphs._fixed) < 2 * len(ordinary.batches)


def test_a_pass_reads_nothing_and_leaves_every_buffer_where_it_is(tiny_data, tiny_config):
    updates = make(tiny_data, tiny_config(cuda_graph=True, precision="bf16", clip_norm=1.0))
    addresses = [p.grad.data_ptr() for p in updates.model.parameters()]
    inner = updates._graphs._run
    places: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    def watched(batch, divisor):
        places.setdefault(batch.shape, set()).add((batch.source.data_ptr(), batch.target_out.data_ptr()))
        assert batch.target_tokens == -1  # of no use to a pass that is replayed with other tokens
        with NoReads():
            inner(batch, divisor)

    updates._graphs._run = watched
    for _ in range(2 * len(updates.batches)):
        updates.perform()
    assert all(len(seen) == 1 for seen in places.values())
    assert [p.grad.data_ptr() for p in updates.model.parameters()] == addresses


def test_a_read_would_be_noticed():
    with NoReads(), pytest.raises(AssertionError, match="reads a value"):
        float(torch.ones(()))


def test_what_no_graph_can_hold_is_refused(tiny_data, tiny_config):
    for name in ("packed", "shard", "checkpoint_activations"):
        with pytest.raises((ValueError, UserError), match=r"cuda.graph.* goes without"):
            tiny_config(cuda_graph=True, **{name: True})
    single = make(tiny_data, tiny_config(cuda_graph=True))
    two = Workers()
    two.size = 2
    assert isinstance(single.batches, TokenBatches)
    with pytest.raises(UserError, match="--cuda-graph is for translation by one worker"):
        Updates(single.model, single.batches, single.config, CPU, two)
