"""Dropout of the operators: seeds, checks, and keep masks on the torch route."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.cpu import training_passes
from fasttfm.functional.record import Whole

dropout_scale = functools.cache(reference.dropout_scale)
LEAST_P = 1 / 512
"""Largest probability that is rounded to 0 of 256."""
_WIDE = {value: value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_WIDE |= dict.fromkeys((torch.float16, torch.bfloat16), torch.float32)
wide = _WIDE.__getitem__
"""The dtype of statistics: float32 for half precision, the dtype itself otherwise."""


def draw_seed(device: torch.device | str | None = None) -> Tensor:
    """Draw a (1,) int64 seed from the device's default torch generator.

    torch.manual_seed therefore determines every dropout mask. The seed is in device memory, so a captured CUDA graph
    draws a new one at each replay.
    """
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


class Dropout(NamedTuple):
    """The dropout arguments of an operator."""

    dropout_p: float = 0.0
    """Probability of a zero."""
    seed: Whole | None = None
    """(1,) int64; None: an operator draws one from torch's generator, a kernel drops nothing."""
    site: int = 0
    """Two dropouts of one seed draw the same mask only at the same site."""

    def options(self) -> dict[str, Any]:
        """The dropout as keyword arguments of an operator."""
        return {"dropout_p": self.dropout_p, "seed": self.seed, "site": self.site}


NO_DROPOUT = Dropout()


def scale_of(dropout: Any) -> float:
    """The factor of kept values, for a Dropout or a call with its fields."""
    return 1.0 if dropout.seed is None else dropout_scale(dropout.dropout_p)


def dropout_for(device: torch.device, dropout_p: float, seed: Tensor | None, site: int, like: str = "x") -> Dropout:
    """Check the dropout arguments, and draw the seed if it is needed and None; no seed if nothing is dropped.

    like: name of the tensor on this device, for errors. Raises ValueError unless 0 <= dropout_p <= 1, and for a seed or
    site that kernels cannot represent.
    """
    if dropout_p == 0.0:
        return NO_DROPOUT
    if reference.dropout_threshold(dropout_p) == 0:
        return Dropout(dropout_p, None, 0)
    if not 0 <= site < 1 << 31:
        raise ValueError(f"site is {site}: it must be at least 0 and below 2^31")
    if seed is None:
        seed = draw_seed(device)
    elif seed.dtype is not torch.int64 or seed.shape != (1,) or seed.device != device:
        raise ValueError(
            f"seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}: int64 (1,) on {device} is needed, "
            f"as draw_seed({like}.device) makes it"
        )
    return Dropout(dropout_p, seed, site)


def keep_mask(x: Tensor, dropout: Any) -> Tensor:
    """The keep mask (M, N) bool of x (M, N), or an empty tensor (0,) without dropout.

    dropout: a Dropout, or a call with its fields.
    """
    if dropout.seed is None:
        return x.new_empty(0, dtype=torch.bool)
    return training_passes.drawn((1, *x.shape), dropout.dropout_p, dropout.seed, dropout.site)[0].contiguous()


def empty_mask(call: Any) -> Tensor | None:
    """A fake keep mask of an operator's x (..., N) on the torch route; None if none is saved."""
    if call.seed is None or call.route != "torch":
        return None
    return call.x.new_empty((call.x.numel() // call.x.shape[-1], call.x.shape[-1]), dtype=torch.bool)


def as_factor(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """keep as zeros and ones of dtype; via int8, because torch's conversion of bool is not vectorised on the CPU."""
    return keep.view(torch.int8).to(dtype)
