"""Batches of sentences of similar length, padded, and the state that a model is in while it reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fasttfm.data.tokenizer import PAD
from fasttfm.functional.linear import frozen_weights

SHORTEST = 16


def length_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Places of sequences of similar length, longest first so that memory runs out at once or not at all.

    A batch is as large as max_tokens allows with padding; a sequence longer than that is a batch of its own. A short
    sequence counts as SHORTEST tokens: its output may be long, and each sentence takes caches for all of that.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if batch and (len(batch) + 1) * max(lengths[batch[0]], SHORTEST) > max_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, longest) int64 ids filled up with padding, and their lengths (B,) int64. ValueError for an empty one."""
    lengths = [len(sequence) for sequence in sequences]
    if not all(lengths):
        raise ValueError("a sequence has no tokens: it must at least hold end-of-sentence")
    ids = torch.full((len(sequences), max(lengths)), PAD)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(sequence)
    return ids.to(device), torch.tensor(lengths, device=device)


@contextmanager
def inference(model: nn.Module) -> Iterator[torch.device]:
    """No dropout, no gradients, no change of weights inside; afterwards the model is in the mode it was in.

    Gives the model's device.
    """
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), frozen_weights(model):
            yield next(model.parameters()).device
    finally:
        model.train(training)
