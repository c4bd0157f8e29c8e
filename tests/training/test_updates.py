"""Updates: batches one at a time, undone without a trace, rates, decay and accumulation."""

import os
import signal
import sys

import pytest
import torch
from torch import nn

from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.data.sampled_batches import SampledBatches
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.training.optimization import Optimization
from fasttfm.training.run import train
from fasttfm.training.updates import Updates
from fasttfm.training.workers import ALONE

from .runs import CPU, records
from .tiny import run, words


def make(tiny_data, config, device=CPU):
    torch.manual_seed(3)
    data = PreparedData.open(tiny_data)
    sampling, tokenizers = config.data.subword_sampling, (data.source_tokenizer, data.target_tokenizer)
    args, together = (data.train, config.data.max_tokens, config.training.seed), config.training.update_freq
    batches = TokenBatches(*args, together=together)
    if sampling:
        batches = SampledBatches(*args, amount=sampling, tokenizers=tokenizers, together=together)
    return Updates(Transformer(config.model), batches, config.training, device)


def state(updates):
    values = updates.values(0.0)
    values["sums"]["seconds"] = 0.0
    return values, [parameter.detach().clone() for parameter in updates.model.parameters()]


def assert_same(one, other):
    assert one[0] == other[0]
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=0)


def test_the_batches_of_an_update_are_taken_one_at_a_time(tiny_data, tiny_config):
    updates = make(tiny_data, tiny_config(update_freq=3))
    calls = []
    for name in ("next_batch", "loss"):
        original = getattr(updates, name)
        setattr(updates, name, lambda *given, name=name, call=original: (calls.append(name), call(*given))[1])
    updates.perform()
    assert calls == ["next_batch", "loss"] * 3


@pytest.mark.parametrize("sampling", [0.0, 0.2])
def test_an_update_that_is_given_up_leaves_no_trace(tiny_data, tiny_config, sampling):
    """Even over the end of an epoch, with dropout and sampled segmentations."""
    config = tiny_config(update_freq=5, subword_sampling=sampling)
    whole, interrupted = make(tiny_data, config), make(tiny_data, config)
    epochs = set()
    for _ in range(4):
        torch.manual_seed(9)
        assert whole.perform()
        torch.manual_seed(9)
        for batches in (1, 4):
            left = iter([False] * (batches - 1))
            assert not interrupted.perform(lambda left=left: next(left, True))
        assert interrupted.perform()
        assert_same(state(whole), state(interrupted))
        epochs.add(whole.position.epoch)
    assert len(epochs) > 1


STOPS_ITSELF = """
import os, signal, sys
from fasttfm.cli.main import main
from fasttfm.training.updates import Updates
drawn, next_batch = 0, Updates.next_batch
def counted(*args):
    global drawn
    drawn += 1
    if drawn == 9:
        os.kill(os.getpid(), signal.SIGTERM)
    assert drawn < 99
    return next_batch(*args)
Updates.next_batch = counted
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.whole
@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_sigterm_ends_an_update_of_ten_million_batches(tiny_data, tmp_path):
    """After a signal at the ninth batch, within the next ninety."""
    done = run([sys.executable, "-c", STOPS_ITSELF, *words(tiny_data, tmp_path / "M", update_freq=9_999_999)])
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stderr.strip().splitlines()[-1].endswith("nothing to save yet: run the same command again to resume")


def test_every_training_record_has_the_peak_of_memory_and_the_number_of_shapes(tiny_data, tiny_values, tmp_path):
    train(tiny_values(max_update=3, log_interval=1), tiny_data, tmp_path / "M", CPU)
    train(tiny_values(max_update=12, log_interval=1), tiny_data, tmp_path / "M", CPU)
    train(tiny_values(max_update=12, log_interval=1), tiny_data, tmp_path / "whole", CPU)
    resumed, whole = (records(tmp_path / name, "train") for name in ("M", "whole"))
    assert all(record["peak_memory"] > 50 << 20 for record in resumed)
    shapes = [record["batch_shapes"] for record in resumed]
    assert shapes == sorted(shapes) == [record["batch_shapes"] for record in whole]
    assert shapes[0] == 1 < shapes[-1]


def test_four_small_batches_are_the_update_of_a_large_one(tiny_data, tiny_config):
    """Gradient accumulation over 4 parts of the same pairs, without dropout, up to rounding."""
    results: list[dict] = []
    pairs = max(make(tiny_data, tiny_config(max_tokens=512)).batches.epoch(0), key=len)[:40]
    for parts in (1, 4):
        updates = make(tiny_data, tiny_config(update_freq=parts, dropout=0.0, max_tokens=512))
        order = [pairs] if parts == 1 else [pairs[:3], pairs[3:20], pairs[20:21], pairs[21:]]
        updates.batches.epoch = lambda epoch, order=order: order
        gradients = {}
        updates.optimization.step = lambda lr, gradients=gradients, updates=updates: (
            gradients.update(enumerate(p.grad.clone() for p in updates.model.parameters())),
            torch.ones(()),
        )[1]
        updates.perform()
        results.append(gradients)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_biases_and_norms_do_not_decay_where_matrices_do(tiny_data, tiny_config):
    decay = {"optimizer": "adamw", "weight_decay": 0.5, "schedule": "constant", "warmup_updates": 0, "lr": 0.1}
    rates = ("encoder.*=0.5",)
    for decayed, shrinks in (("all", lambda _: True), ("matrices", lambda parameter: parameter.dim() > 1)):
        updates = make(tiny_data, tiny_config(decayed=decayed, rates=rates, **decay))
        with torch.no_grad():
            before = {name: each.fill_(1.0).clone() for name, each in updates.module.named_parameters()}
            for parameter in updates.module.parameters():
                parameter.grad = torch.zeros_like(parameter)
        updates.optimization.step(torch.tensor(0.1, dtype=torch.float64))
        for name, parameter in updates.module.named_parameters():
            lost = 0.1 * 0.5 * (0.5 if name.startswith("encoder.") else 1.0) if shrinks(parameter) else 0.0
            torch.testing.assert_close(parameter.detach(), before[name] * (1 - lost), msg=name)


def test_parts_of_a_model_learn_at_other_rates(tiny_data, tiny_config):
    """The last matching pattern counts; Adam's first step equals the learning rate."""
    rates = ("encoder.*=0.5", "*embedding*=0", "encoder.layers.0.linear1.*=0.25")
    config = tiny_config(rates=rates, schedule="constant", warmup_updates=0, lr=0.01, adam_eps=1e-30)
    updates = make(tiny_data, config)
    before = {name: p.detach().clone() for name, p in updates.model.named_parameters()}
    updates.perform()
    expected = {
        "target_embedding.weight": 0.0,
        "encoder.layers.0.linear1.weight": 0.0025,
        "encoder.layers.0.linear2.weight": 0.005,
        "decoder.layers.0.linear2.weight": 0.01,
    }
    for name, step in expected.items():
        change = (updates.model.get_parameter(name).detach() - before[name]).abs().max()
        torch.testing.assert_close(change, torch.tensor(step), rtol=1e-3, atol=1e-9)


def test_a_run_with_rates_resumes_bit_by_bit(tiny_data, tiny_config):
    config = tiny_config(rates=("encoder.*=0.5",))
    whole, first, second = (make(tiny_data, config) for _ in range(3))
    for _ in range(4):
        whole.perform()
    for _ in range(2):
        first.perform()
    second.model.load_state_dict(first.model.state_dict())
    second.load(first.tensors(), first.values(0.0))
    for _ in range(2):
        second.perform()
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))


def test_a_tensor_of_the_state_belongs_to_the_parameter_of_its_whole_name(tiny_config):
    inner = nn.ModuleDict({"linear": nn.Linear(2, 3)})
    model = nn.ModuleDict({"linear": nn.Linear(4, 5), "inner": inner})
    optimization = Optimization(model, tiny_config().training, CPU, ALONE)
    for kind in ("adam.step", "adam.exp_avg_sq", "muon.momentum", "raw"):
        assert optimization.source_of(f"{kind}.inner.linear.weight") is inner["linear"].weight
        assert optimization.source_of(f"{kind}.linear.bias") is model["linear"].bias
    assert optimization.source_of("raw.other") is None


def test_a_pattern_that_no_parameter_fits_is_named(tiny_data, tiny_config):
    with pytest.raises(UserError, match="no parameter's name fits encodr"):
        make(tiny_data, tiny_config(rates=("encodr.*=0.5",)))
    for wrong in ("encoder", "encoder=x", "=1", "encoder=-1", "encoder=inf"):
        with pytest.raises(UserError, match="pattern=number"):
            tiny_config(rates=(wrong,))


def test_checkpointed_activations_train_to_the_same_bits(tiny_data, tiny_config):
    results = []
    for enabled in (False, True):
        updates = make(tiny_data, tiny_config(checkpoint_activations=enabled, update_freq=2))
        for _ in range(3):
            updates.perform()
        results.append(list(updates.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
