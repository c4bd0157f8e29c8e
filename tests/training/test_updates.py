"""Updates: batches one at a time, given up without a trace; and what watches over them."""

import os
import signal

import pytest
import torch

from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.models import Transformer
from fasttfm.training.log import read_log
from fasttfm.training.run import train
from fasttfm.training.throughput import Throughput
from fasttfm.training.updates import Updates

from .tiny import start, train_command

CPU = torch.device("cpu")


def make(tiny_data, config):
    torch.manual_seed(3)
    data = PreparedData.open(tiny_data)
    sampling, tokenizers = config.data.subword_sampling, (data.source_tokenizer, data.target_tokenizer)
    batches = TokenBatches(data.train, config.data.max_tokens, config.training.seed, None, sampling, tokenizers)
    return Updates(Transformer(config.model), batches, config.training, CPU)


def state(updates):
    values = updates.values(0.0)
    values["sums"]["seconds"] = 0.0
    return values, [parameter.detach().clone() for parameter in updates.model.parameters()]


def assert_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


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
    """Also one that goes over the end of an epoch, with dropout and sampled segmentations."""
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


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_sigterm_ends_an_update_of_ten_million_batches(tiny_data, tmp_path):
    process = start(train_command(tiny_data, tmp_path / "M", update_freq=9_999_999))
    for line in process.stderr:
        if line.startswith("starting"):
            break
    with pytest.raises(Exception, match="timed out"):
        process.communicate(timeout=3)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr.strip().splitlines()[-1].endswith("nothing to save yet: run the same command again to go on")


def test_every_training_record_has_the_peak_of_memory_and_the_number_of_shapes(tiny_data, tiny_values, tmp_path):
    train(tiny_values(max_update=3, log_interval=1), tiny_data, tmp_path / "M", CPU)
    train(tiny_values(max_update=12, log_interval=1), tiny_data, tmp_path / "M", CPU)
    train(tiny_values(max_update=12, log_interval=1), tiny_data, tmp_path / "whole", CPU)
    records, whole = (
        [record for record in read_log(tmp_path / name) if record["kind"] == "train"] for name in ("M", "whole")
    )
    assert all(record["peak_memory"] > 50 << 20 for record in records)
    shapes = [record["batch_shapes"] for record in records]
    assert shapes == sorted(shapes) == [record["batch_shapes"] for record in whole]
    assert shapes[0] == 1 < shapes[-1]


def test_a_collapse_of_throughput_is_told_once_with_both_numbers():
    watch = Throughput()
    rates = [300, 1500, 1600, 1550, 1600, 500, 1500, 500, 450, 400, 1600, 300, 300]
    said = [watch.warning(10 * rate) for rate in rates]
    assert [line is not None for line in said] == [False] * 8 + [True] + [False] * 4
    assert "only 4,500 tokens/s where 15,250 were usual" in said[8]
