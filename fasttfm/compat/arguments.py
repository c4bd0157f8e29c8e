"""Shared by the signatures: checks of ranks and heads, bottom-right aligned masks and windows."""

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.record import WHOLE
from fasttfm.functional.signature import is_flag

Window = tuple[int | None, int | None] | None


def scoring(
    function: str, causal: bool, window: Window, lengths: tuple[int, int], slopes: Tensor | None, surplus: int | Tensor
) -> dict[str, Any]:
    """attention()'s arguments for causal, window (left, right) and ALiBi slopes, the last query at the last key.

    None, -1, and a side that covers lengths, those of the longest queries and keys, are no bound. surplus: keys minus
    queries. Raises TypeError, ValueError for another window.
    """
    is_flag("causal", causal)
    if window is not None and (not isinstance(window, tuple | list) or len(window) != 2):
        raise TypeError(f"{function}: window_size={window!r} must be (left, right), or None")
    left, right = (None if side == -1 else side for side in window or (None, None))
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | torch.SymInt) or side < 0):
            raise ValueError(f"{function}: window_size={window!r} has {side!r}: each side must be 0 or more, or -1")
    queries, keys = lengths
    if left is not None and left >= keys - 1:  # the last query sees the first key
        left = None
    if causal or (right is not None and right >= queries - 1):  # the first query sees the last key
        right = None
    bounded = left is not None or right is not None
    if not causal and not bounded and slopes is None:
        return {}
    options: dict[str, Any] = {"causal": causal, "causal_offset": surplus, "alibi_slopes": slopes}
    return options | {"window": (left, right)} if bounded else options


def surplus_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> int | Tensor:
    """Keys minus queries of each sequence (B,); 0 for wrong cu_seqlens, which varlen_attention() refuses."""
    q, k = ((x.dtype in WHOLE, x.shape, x.device) for x in (cu_seqlens_q, cu_seqlens_k))
    if cu_seqlens_q is cu_seqlens_k or q != k or not q[0]:
        return 0
    return cu_seqlens_k.diff() - cu_seqlens_q.diff()


def check_rank(function: str, rank: int, parts: int | None = None, **tensors: Tensor) -> None:
    """Raise ValueError unless each tensor has rank dimensions, and parts in the third from the right."""
    for name, x in tensors.items():
        if x.dim() != rank or (parts is not None and x.shape[-3] != parts):
            needed = f"{rank} dimensions" + ("" if parts is None else f", {parts} in the third from the right")
            raise ValueError(f"{function}: {name} {tuple(x.shape)} must have {needed}")


def check_heads(function: str, **tensors: Tensor) -> None:
    """Raise ValueError unless the heads of keys and values (..., Hk, D) divide those of the query (..., H, D), which
    comes first."""
    (query, x), *others = tensors.items()
    heads = x.shape[-2]
    for name, x in others:
        if x.shape[-2] != heads and (not x.shape[-2] or heads % x.shape[-2]):
            raise ValueError(f"{function}: {name} has {x.shape[-2]} heads, which must divide the {heads} of {query}")
