"""Gradient exchange during the backward pass: the sums of a single message, in the same order on all ranks."""

import os

import pytest
import torch

from fasttfm.config.training import TrainingConfig
from fasttfm.training.exchange import GradientExchange
from fasttfm.training.optimization import Optimization
from fasttfm.training.workers import ALONE, Workers

from .test_workers import assert_close, trained
from .tiny import words


class Echo(Workers):
    """Two ranks with the same gradients; records the order of events."""

    def __init__(self):
        super().__init__(0, 2)
        self.events = []

    def begin_to_add_up(self, tensor):
        self.events.append(("send", tensor.numel()))
        sent = tensor.clone()

        def wait():
            assert torch.equal(tensor, sent), "changed on its way"
            self.events.append(("wait", tensor.numel()))
            tensor.add_(sent)

        return wait


def chain(sizes):
    """Consecutive layers and their parameters."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4, bias=False) if size == 16 else torch.nn.Linear(4, 4) for size in sizes]
    return layers, [parameter for layer in layers for parameter in layer.parameters()]


def loss_of(layers):
    x = torch.ones(2, 4)
    for layer in layers:
        x = layer(x).tanh()
    return x.sum()


def test_buckets_leave_while_backward_goes_on_and_the_last_pass_alone_sends():
    layers, parameters = chain([16, 16, 16])
    alone = torch.autograd.grad(loss_of(layers), parameters)
    workers = Echo()
    exchange = GradientExchange(parameters, workers, bucket=16)

    def watch(module, given, out):
        out.register_hook(lambda gradient: workers.events.append("layer 0"))

    layers[0].register_forward_hook(watch)
    loss_of(layers).backward()
    assert workers.events == ["layer 0"], "of several passes the first are not sent"
    exchange.expect_last()
    loss_of(layers).backward()
    assert workers.events[1:] == [("send", 17), ("send", 17), "layer 0", ("send", 17)]
    exchange.finish()
    assert workers.events[5:] == [("wait", 17)] * 3
    for parameter, gradient in zip(parameters, alone, strict=True):
        torch.testing.assert_close(parameter.grad, 4 * gradient)  # two passes, two ranks


def test_what_backward_reached_on_no_rank_is_sent_at_the_end_and_has_no_gradient():
    layers, parameters = chain([16, 20, 16])
    workers = Echo()
    exchange = GradientExchange(parameters, workers, bucket=1)
    for has_rows in (True, False, True, False):  # the later ones find what the earlier ones left in the message
        if has_rows:
            exchange.expect_last()
            loss_of(layers[:2]).backward()
        exchange.finish()
        assert [each.grad is not None for each in parameters] == [has_rows] * 3 + [False]
        assert [count for kind, count in workers.events if kind == "send"] == [17, 5, 17, 17]
        workers.events.clear()
        for parameter in parameters:
            parameter.grad = None


def test_a_rank_without_rows_has_the_gradients_of_the_others():
    _, parameters = chain([20])
    workers = Workers(0, 2)
    workers.begin_to_add_up = lambda message: lambda: message.add_(1.0)  # the other rank's
    exchange = GradientExchange(parameters, workers)
    for _ in range(2):
        exchange.finish()
        assert all(torch.equal(each.grad, torch.ones_like(each)) for each in parameters)
        for parameter in parameters:
            parameter.grad = None


def test_weight_decay_leaves_a_parameter_that_no_rank_reached_as_a_single_process_does():
    """Two ranks of the same rows take the step of one; the second layer takes no part."""
    config = TrainingConfig(optimizer="adamw", weight_decay=0.5, precision="fp32")
    saved = []
    for workers in (ALONE, Echo()):
        layers, _ = chain([20, 20])
        model = torch.nn.ModuleList(layers)
        before = [each.detach().clone() for each in layers[1].parameters()]
        optimization = Optimization(model, config, torch.device("cpu"), workers)
        for _ in range(2):
            optimization.expect_last()
            optimization.backward(loss_of(layers[:1]) / workers.size)
            optimization.add_up_gradients()
            optimization.step(torch.tensor(0.1, dtype=torch.float64))
        assert all(map(torch.equal, layers[1].parameters(), before))
        saved.append({**optimization.tensors(), **model.state_dict()})
    assert saved[0].keys() == saved[1].keys()
    torch.testing.assert_close(saved[1], saved[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_many_small_messages_end_in_the_weights_of_a_single_one(run_ranks, tiny_data, tmp_path):
    """Three ranks with dropout, two batches per update, one rank often without rows: ranks never mix up buckets."""
    recipe = {"update_freq": 2, "max_tokens": 48, "valid_interval_updates": 0, "adam_eps": 1e-4, "clip_norm": 1.0}
    recipe |= {"encoder_layers": 2, "decoder_layers": 2}
    sizes = (1, 10**9)
    runs = [{"size": 3, "words": words(tiny_data, tmp_path / str(n), **recipe), "bucket": n} for n in sizes]
    statuses, stderr = run_ranks(*runs)
    assert statuses == [[0, 0, 0]] * 2, stderr
    assert_close(tmp_path / "1", tmp_path / str(10**9))
    assert [record["step"] for record in trained(tmp_path / "1")] == [3, 6, 9, 12]
