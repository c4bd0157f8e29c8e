"""Memory estimate of a search on a device, checked before anything is allocated."""

from typing import Any

import torch

from fasttfm.errors import UserError
from fasttfm.search.device.state import Sizes
from fasttfm.system.memory import available_bytes


def needed_bytes(model: Any, sizes: Sizes) -> int:
    """Approximate memory of an engine of these sizes: caches, state and logits."""
    per_row = per_place = 0
    for each in getattr(model, "models", [model]):
        config, size = each.config, next(each.parameters()).element_size()
        per_row += 2 * config.decoder_layers * config.d_model * sizes.steps * size
        per_row += sizes.vocabulary * (size + 4) + (8 * config.d_model + config.d_ff) * size
        per_place += 2 * config.decoder_layers * config.d_model * sizes.sources * size
    per_row += 8 * sizes.steps
    per_place += (16 * sizes.beam + 12) * sizes.steps
    return sizes.rows * per_row + (sizes.places + 1) * per_place + 1024


def refuse_more_than_free(model: Any, sizes: Sizes, device: torch.device, tokens: int) -> None:
    """Raise UserError if an engine of these sizes needs more memory than is free; the message names a batch that fits.

    tokens: padded source tokens per sentence.
    """
    free = _free_on_gpu(device) if device.type == "cuda" else available_bytes()
    needed = needed_bytes(model, sizes)
    if free is None or needed <= free:
        return
    smaller = (sizes._replace(slots=n, places=2 * n) for n in range(sizes.slots - 1, 0, -1))
    fits = next((each.slots for each in smaller if needed_bytes(model, each) <= free), 0)
    remedy = f"--batch-tokens {fits * tokens:,} fits" if fits else "give a smaller --beam or --max-len-b"
    raise UserError(
        f"a search of {sizes.slots:,} sentences at once with {sizes.beam:,} hypotheses of up to {sizes.steps:,} tokens "
        f"needs about {needed / 2**30:,.1f} GiB, but {free / 2**30:,.1f} GiB are free on {device}: {remedy}"
    )


def _free_on_gpu(device: torch.device) -> int:
    """Free memory of the device plus what PyTorch's allocator caches."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
