"""Parts that the signatures share: checks of ranks and heads, triangles and windows at the lower right."""

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.signature import is_flag

Window = tuple[int | None, int | None] | None


def places(
    function: str, causal: bool, window: Window, lengths: tuple[int, int], slopes: Tensor | None, surplus: int | Tensor
) -> dict[str, Any]:
    """The arguments of attention() for causal, (left, right) and ALiBi's slopes, the last query at the last key.

    window: None, -1 or None in it, and a side that reaches past lengths, those of the longest queries and keys, are no
    bound. surplus: how many keys more than queries there are. Raises TypeError, ValueError for another window.
    """
    is_flag("causal", causal)
    if window is not None and (not isinstance(window, tuple | list) or len(window) != 2):
        raise TypeError(f"{function}: window_size={window!r} must be (left, right), or None")
    left, right = (None if side == -1 else side for side in window or (None, None))
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | torch.SymInt) or side < 0):
            raise ValueError(f"{function}: window_size={window!r} has {side!r}: whole numbers from 0 up, or -1")
    queries, keys = lengths
    if left is not None and left >= keys - 1:  # the last query, which looks back furthest, sees the first key
        left = None
    if causal or (right is not None and right >= queries - 1):  # the first query sees the last key
        right = None
    bounded = left is not None or right is not None
    if not causal and not bounded and slopes is None:
        return {}
    looks: dict[str, Any] = {"causal": causal, "causal_offset": surplus, "alibi_slopes": slopes}
    return looks | {"window": (left, right)} if bounded else looks


def surplus_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> int | Tensor:
    """The number of keys less that of queries in each sequence, (B,); starts that do not fit are varlen_attention()'s
    to refuse."""
    whole = cu_seqlens_q.dtype in (torch.int32, torch.int64) and cu_seqlens_k.dtype in (torch.int32, torch.int64)
    places = cu_seqlens_q.shape, cu_seqlens_q.device
    if cu_seqlens_q is cu_seqlens_k or not whole or places != (cu_seqlens_k.shape, cu_seqlens_k.device):
        return 0
    return cu_seqlens_k.diff() - cu_seqlens_q.diff()


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
