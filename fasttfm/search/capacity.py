"""Memory estimate of a search on a CPU, because a system that runs out of memory kills processes without a message."""

from collections.abc import Sequence
from typing import Any

import torch

from fasttfm.config.decoding import DecodingConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.errors import UserError
from fasttfm.system.memory import available_bytes


def search_bytes(
    model: TransformerConfig, config: DecodingConfig, sentences: int, source_length: int, element_bytes: int
) -> int:
    """Approximate memory of a search over a batch if outputs are as long as their sources.

    Counts the KV caches, logits and log-probabilities in float32, and the random numbers that sampling draws up front.
    """
    rows = sentences * (config.nbest if config.sampling else config.beam)
    keys_and_values = 2 * model.decoder_layers * model.d_model * source_length * element_bytes
    total = rows * (keys_and_values + 2 * 4 * model.vocab_size) + sentences * keys_and_values
    if config.sampling:
        total += rows * (config.longest_output(source_length) + 1) * 8
    return total


def refuse_more_than_available(
    model: Any, sources: Sequence[Sequence[int]], config: DecodingConfig, device: torch.device, at_once: int
) -> None:
    """Raise UserError if `at_once` searches like that of `sources` need more memory than is free on a CPU.

    A GPU reports an allocation failure by itself.
    """
    available = available_bytes() if device.type == "cpu" else None
    batch = len(sources), max(map(len, sources)), next(model.parameters()).element_size()
    members = getattr(model, "models", [model])  # an ensemble's caches
    needed = at_once * sum(search_bytes(each.config, config, *batch) for each in members)
    if available is None or needed <= available:
        return
    sentences = at_once * len(sources)
    kind, flag = (config.nbest, "--nbest") if config.sampling else (config.beam, "--beam")
    remedy = f"{flag} or --batch-tokens" if sentences > 1 else flag
    raise UserError(
        f"{flag} {kind:,} needs about {needed / 2**30:,.1f} GiB for {sentences:,} "
        f"sentence{'s' if sentences > 1 else ''} at once, but {available / 2**30:,.1f} GiB of memory are free: give a "
        f"smaller {remedy}"
    )
