"""Helpers for tests of training runs: a trainer, and the weights and log of a run."""

import torch

from fasttfm.data.batches import TokenBatches
from fasttfm.models import Transformer
from fasttfm.store.checkpoint import read_weights
from fasttfm.store.run_log import read_log
from fasttfm.store.steps import resolve_checkpoint
from fasttfm.training.trainer import Trainer

CPU = torch.device("cpu")
TIMES = ("seconds", "tokens_per_second", "peak_memory")


def weights_of(model_dir, which="last"):
    return read_weights(resolve_checkpoint(model_dir, which))


def assert_same_weights(one, other):
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


def records(model_dir, kind):
    """The log records of a kind."""
    return [record for record in read_log(model_dir) if record["kind"] == kind]


def log_without_times(model_dir, times=TIMES):
    return [{key: value for key, value in record.items() if key not in times} for record in read_log(model_dir)]


def make_trainer(config, data, tmp_path):
    torch.manual_seed(3)
    batches = TokenBatches(data.train, config.data.max_tokens, config.training.seed)
    model = Transformer(config.model)
    return Trainer(model, batches, config.training, tmp_path, validator=None, device=CPU)
