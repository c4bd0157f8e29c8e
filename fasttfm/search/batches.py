"""Batches of sentences of similar length, padded, and the state that a model is in while it reads them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.cpu.linear import froze, frozen_weights
from fasttfm.data.shapes import round_length
from fasttfm.data.tokenizer import PAD

SHORTEST = 16
"""A shorter source counts as so many tokens: its output may be long, and each takes caches for all of that."""


LENGTHS = 8
"""Granularity of padded lengths in batch-invariant searches; a batch holds sequences of one padded length."""


def padded(sequences: Sequence[Sequence[int]], device: torch.device, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """(B, L) int64 ids filled up with padding, and their lengths (B,) int64. ValueError for an empty one.

    L is the longest one's length on the grid of round_length, so that few shapes occur; a multiple of `multiple`.
    """
    lengths = [len(sequence) for sequence in sequences]
    if not all(lengths):
        raise ValueError("a sequence has no tokens: it must at least hold end-of-sentence")
    ids = torch.full((len(sequences), round_length(max(lengths), multiple)), PAD, device="cpu")
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.as_tensor(sequence, device="cpu")
    return ids.to(device), torch.tensor(lengths, device=device)


@contextmanager
def evaluating(model: nn.Module, device: torch.device, autocast: torch.dtype | None = None) -> Iterator[None]:
    """No dropout and no gradients inside; afterwards the model is in the mode it was in.

    autocast: the type of matrix products on the device, None for the weights' own. Unlike inference(), which is for
    search, weights and tensors stay as they are.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            yield
    finally:
        model.train(training)


def multiply_in_int8(model: Any, enabled: bool = True) -> None:
    """Let inference() with this model multiply 8-bit integers on a CPU (cpu/int8.py)."""
    model.int8_products = enabled


def multiplies_in_int8(model: nn.Module) -> bool:
    """Return whether multiply_in_int8() was called for this model."""
    return bool(getattr(model, "int8_products", False))


@contextmanager
def inference(model: nn.Module, *, batch_invariant: bool = False) -> Iterator[torch.device]:
    """No dropout, no gradients, no change of weights inside; afterwards the model is in the mode it was in.

    batch_invariant: of sequences padded to one length each gets the same bits, whatever stands beside it, on a CPU.
    Gives the model's device.
    """
    training, int8 = model.training, multiplies_in_int8(model)
    if not froze(model) and any(each.training for each in model.modules()):  # eval() writes to every module
        model.eval()
    try:
        with torch.inference_mode(), frozen_weights(model, batch_invariant=batch_invariant, int8=int8):
            yield next(model.parameters()).device
    finally:
        if training:
            model.train()
