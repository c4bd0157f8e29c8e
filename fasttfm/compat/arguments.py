"""Parts that the signatures share: refusals, checks of ranks and heads, the causal triangle at the lower right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.signature import is_flag


def refuse(function: str, **given: tuple[Any, Any]) -> None:
    """Raises ValueError for the first argument whose value is not the one that switches it off.

    given: by the argument's name, its value and the value that switches it off.
    """
    for name, (value, off) in given.items():
        if value is not off and (off is None or value != off):
            shown = f" of {tuple(value.shape)}" if isinstance(value, Tensor) else f"={value!r}"
            raise ValueError(f"{function}: {name}{shown} is not supported: leave it at {off!r}")


def causal_of_window(
    function: str, window: tuple[int | None, int | None] | None, lengths: tuple[int, int], causal: bool = False
) -> bool:
    """Return whether (left, right) is the causal triangle, or asked for beside it; ValueError for a true window.

    window: None, or None in it, is no window, and so is a side that reaches past lengths, those of the longest queries
    and keys: the last query sees the last key, and what it lets all see hides nothing.
    """
    is_flag("causal", causal)
    if window is not None and (not isinstance(window, tuple | list) or len(window) != 2):
        raise TypeError(f"{function}: window_size={window!r} must be (left, right), or None")
    shown = (-1, -1) if window is None else tuple(window)
    left, right = (-1 if side is None else side for side in shown)
    queries, keys = lengths
    if left >= keys - 1:  # the last query, which looks back furthest, sees the first key
        left = -1
    if causal:
        right = 0
    elif right >= queries - 1:  # the first query sees the last key
        right = -1
    if left >= 0 or right > 0:
        raise ValueError(f"{function}: window_size={shown} is not supported: give (-1, -1) or, causal, (-1, 0)")
    return right == 0


def check_rank(function: str, rank: int, parts: int | None = None, **tensors: Tensor) -> None:
    """Raises ValueError unless each tensor has that many dimensions, the third from the right of parts."""
    for name, x in tensors.items():
        if x.dim() != rank or (parts is not None and x.shape[-3] != parts):
            wanted = f"{rank} dimensions" + ("" if parts is None else f", {parts} in the third from the right")
            raise ValueError(f"{function}: {name} {tuple(x.shape)} must have {wanted}")


def check_heads(function: str, **tensors: Tensor) -> None:
    """Raises ValueError where keys or values (..., Hk, D) do not have a divisor of the query's heads (..., H, D); the
    query comes first."""
    (query, x), *others = tensors.items()
    heads = x.shape[-2]
    for name, x in others:
        if x.shape[-2] != heads and (not x.shape[-2] or heads % x.shape[-2]):
            raise ValueError(
                f"{function}: {query} has {heads} heads and {name} {x.shape[-2]}: a divisor of them is needed"
            )


def corner_offset(function: str, query_starts: Tensor, key_starts: Tensor) -> int:
    """Return how many keys more than queries each sequence has: the last query sees the last key.

    Raises ValueError where that differs between sequences. It reads the lengths, for which a GPU is waited for, unless
    both are one tensor.
    """
    if query_starts is key_starts:
        return 0
    surplus = torch.unique(key_starts.diff() - query_starts.diff()).tolist()
    if len(surplus) > 1:
        raise ValueError(
            f"{function}: causal needs keys that outnumber the queries by one and the same number in every sequence "
            f"(here by {surplus[0]} to {surplus[-1]}): call it once for each"
        )
    return surplus[0] if surplus else 0
