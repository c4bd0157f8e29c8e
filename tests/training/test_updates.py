"""Updates: the gradient, batches one at a time, undone without a trace, rates and decay."""

import pytest
import torch
from torch import nn

from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.data.sampled_batches import SampledBatches
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.training.optimization import Optimization
from fasttfm.training.updates import Updates
from fasttfm.training.workers import ALONE

from .runs import CPU


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


def test_the_gradient_is_the_mean_over_all_target_tokens_and_batches_are_taken_one_at_a_time(tiny_data, tiny_config):
    """Accumulation over three batches of different sizes equals the gradient of the summed loss over all tokens."""
    updates = make(tiny_data, tiny_config(update_freq=3, dropout=0.0, label_smoothing=0.1))
    calls, seen, parameters = [], [], list(updates.module.parameters())
    for name in ("next_batch", "loss"):
        original = getattr(updates, name)
        setattr(updates, name, lambda *given, name=name, call=original: (calls.append(name), call(*given))[1])

    def step(lr):
        seen.extend(parameter.grad.clone() for parameter in parameters)
        return torch.ones(())

    updates.optimization.step = step
    updates.perform()
    assert calls == ["next_batch", "loss"] * 3
    updates.module.zero_grad()
    chosen = [updates.batches.batch(indices) for indices in updates.batches.epoch(0)[:3]]
    assert len({batch.target_tokens for batch in chosen}) > 1
    total = sum(updates.model.batch_loss(batch, label_smoothing=0.1)[0] for batch in chosen)
    (total / sum(batch.target_tokens for batch in chosen)).backward()
    torch.testing.assert_close(seen, [parameter.grad for parameter in parameters])


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


def test_rehearsing_the_largest_batch_changes_nothing(tiny_data, tiny_config):
    updates = make(tiny_data, tiny_config())
    before, generator = state(updates), torch.get_rng_state()
    updates.rehearse()
    assert torch.equal(torch.get_rng_state(), generator)
    assert_same(state(updates), before)
    assert all(parameter.grad is None for parameter in updates.module.parameters())


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
    for name, step in (
        ("target_embedding.weight", 0.0),
        ("encoder.layers.0.linear1.weight", 0.0025),
        ("encoder.layers.0.linear2.weight", 0.005),
        ("decoder.layers.0.linear2.weight", 0.01),
    ):
        change = (updates.model.get_parameter(name).detach() - before[name]).abs().max()
        torch.testing.assert_close(change, torch.tensor(step), rtol=1e-3, atol=1e-9)


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
