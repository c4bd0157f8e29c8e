"""Padded batches, and the model state for evaluation and search (eval mode, no gradients, frozen weights)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.cpu.linear import froze, frozen_weights
from fasttfm.data.shapes import round_length
from fasttfm.data.tokenizer import PAD

SHORTEST = 16
"""Minimum length that a source counts as: even a short source may have a long output that needs cache memory."""
LENGTHS = 8
"""Granularity of padded lengths in batch-invariant searches; all sequences of a batch have one padded length."""


def padded(sequences: Sequence[Sequence[int]], device: torch.device, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Pad sequences to ids (B, L) int64 and lengths (B,) int64. Raises ValueError for an empty sequence.

    L is the longest length on the grid of round_length(), a multiple of `multiple`, so that few shapes occur.
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
    """Disable dropout and gradients; each module's training mode is restored on exit.

    autocast: dtype of matrix products on the device; None: that of the weights. Unlike inference(), which is for
    search, this neither freezes weights nor creates inference tensors.
    """
    with _eval_mode(model), torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
        yield


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode of all modules; each module's own mode is restored on exit."""
    modes = [(each, each.training) for each in model.modules()]
    if any(training for _, training in modes):  # eval() writes to every module
        model.eval()
    try:
        yield
    finally:
        for each, training in modes:  # a module comes before its children, whose modes train() sets too
            if each.training != training:
                each.train(training)


def multiply_in_int8(model: Any, enabled: bool = True) -> None:
    """Make inference() multiply this model's weights in int8 on a CPU (cpu/int8.py)."""
    model.int8_products = enabled


def multiplies_in_int8(model: nn.Module) -> bool:
    """Return whether int8 products are enabled for this model by multiply_in_int8()."""
    return bool(getattr(model, "int8_products", False))


@contextmanager
def inference(model: nn.Module, *, batch_invariant: bool = False) -> Iterator[torch.device]:
    """Disable dropout and gradients and freeze the weights; each module's training mode is restored on exit.

    batch_invariant: on a CPU, sequences padded to one length get the same bits whatever their batch contains.
    Yields the model's device.
    """
    int8 = multiplies_in_int8(model)
    with (
        nullcontext() if froze(model) else _eval_mode(model),
        torch.inference_mode(),
        frozen_weights(model, batch_invariant=batch_invariant, int8=int8),
    ):
        yield next(model.parameters()).device
