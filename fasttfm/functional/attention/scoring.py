"""attention()'s scoring arguments as Options: causal alignment, windows, soft caps, ALiBi slopes, sinks."""

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.attention.call import LARGEST, Options, Window
from fasttfm.functional.backends import values_are_checked
from fasttfm.functional.dropout import dropout_for, wide
from fasttfm.functional.operator import WHOLE
from fasttfm.functional.signature import is_flag

Causal = bool | str
"""False; True or "top_left": query i at key i + causal_offset; "bottom_right": the last query at the last key."""


def without_bias(
    mask: Tensor | None, causal: Causal, causal_offset: int | Tensor, queries: Any, keys: Any
) -> tuple[Tensor | None, Causal, int | Tensor]:
    """Return mask, causal and causal_offset, with a torch.nn.attention.bias.CausalBias over (L, S) replaced by causal.

    Its memory holds no values. Raises ValueError for other lengths, or if causal is given too.
    """
    if mask is None or type(mask).__name__ != "CausalBias":
        return mask, causal, causal_offset
    bias: Any = mask
    if causal or (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        raise ValueError(
            f"mask is a CausalBias of {(bias.seq_len_q, bias.seq_len_kv)} beside causal={causal!r}: it must be of "
            f"(L, S) = {(queries, keys)}, and causal left out"
        )
    return None, True, keys - queries if bias.variant.name == "LOWER_RIGHT" else 0


def options_of(
    query: Tensor, shape: tuple[Any, Any, Any, Any], *, key_lengths: Tensor | None = None, mask: Tensor | None = None,
    causal: Causal = False, causal_offset: int | Tensor = 0, window: Window | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, scale: float | None = None,
    seed: Tensor | None = None, site: int = 0, surplus: Tensor | int | None = None,
) -> Options:  # fmt: skip
    """Convert attention()'s arguments to Options, for scores of shape (B, H, L, S).

    surplus: keys minus queries per batch row, if known; else computed from key_lengths or S. Raises TypeError,
    ValueError.
    """
    dropout_p, seed, site = dropout_for(query.device, dropout_p, seed, site, "query")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    elif not -LARGEST <= scale <= LARGEST:
        raise ValueError(f"scale={scale!r} must be a number between {-LARGEST} and {LARGEST}")
    scale = scale * 1.0  # an int may exceed 64 bits
    batch, heads, queries, keys = shape
    for name, x in (("causal_offset", causal_offset), ("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if isinstance(x, Tensor) and x.device != query.device:
            raise ValueError(f"{name} is on {x.device} and query on {query.device}: both must be on one device")
    left, right = _sides(window)
    offset: Any = causal_offset
    offsets: Tensor | None = None
    if isinstance(offset, Tensor):
        if offset.shape != (batch,) or offset.dtype not in WHOLE:
            what = f"causal_offset {offset.dtype} {tuple(offset.shape)}"
            raise ValueError(f"{what} must be an int, or int32 or int64 {(batch,)}")
        offset, offsets = 0, offset
    elif (
        isinstance(offset, int) and abs(offset) >= 1 << 61  # plus a window's side it would exceed 64 bits
        and (isinstance(causal, str) or softcap != 0.0 or not window is alibi_slopes is sinks is None)
    ):  # fmt: skip
        raise ValueError(f"causal_offset={offset} must be below 2^61 in size with a window, softcap, slopes or sinks")
    if causal == "bottom_right":
        if surplus is None and key_lengths is not None:
            surplus = key_lengths.clamp(0, keys) - queries
        if not isinstance(surplus, Tensor):
            offset = offset + (keys - queries if surplus is None else surplus)
        else:
            offsets = surplus if offsets is None else offsets + surplus
    elif isinstance(causal, str) and causal != "top_left":
        raise ValueError(f'causal={causal!r} must be False, True, "top_left" or "bottom_right"')
    elif not isinstance(causal, str):
        is_flag("causal", causal)
    if causal:
        right = 0
    if not (isinstance(softcap, int | float) and (softcap == 0 or 1e-30 <= softcap <= LARGEST)):
        raise ValueError(f"softcap={softcap!r} must be 0 (off) or a number from 1e-30 to {LARGEST}")
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_floating_point()):
        raise ValueError(f"sinks {sinks.dtype} {tuple(sinks.shape)} must be floats ({heads},), one per head")
    slopes = None if alibi_slopes is None else _slopes(alibi_slopes, batch, heads).to(wide(query.dtype))
    window_size = -1 if left is None else left + (right or 0)
    return Options(
        key_lengths, mask, right is not None, offset + (right or 0), dropout_p, scale, seed, site, offsets, window_size,
        float(softcap), slopes, right or 0, sinks,
    )  # fmt: skip


def _sides(window: Window | None) -> Window:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(
            f"window={window!r} must be (left, right): keys before and past the diagonal, None for no bound"
        )
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | torch.SymInt) or side < 0):
            raise ValueError(f"window={tuple(window)} has {side!r}: each side must be an int from 0 up, or None")
        if side is not None and side >= 1 << 62:
            raise ValueError(f"window={tuple(window)} has {side!r}: it must be below 2^62; None is no bound")
    return window[0], window[1]


def _slopes(slopes: Tensor, batch: Any, heads: Any) -> Tensor:
    """Check alibi_slopes and return them as (B, H) or (1, H)."""
    if slopes.shape not in ((heads,), (batch, heads)) or not slopes.is_floating_point():
        raise ValueError(
            f"alibi_slopes {slopes.dtype} {tuple(slopes.shape)} must be floats ({heads},), one per head, or "
            f"({batch}, {heads})"
        )
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires a gradient, but none is computed: give alibi_slopes.detach()")
    if values_are_checked(slopes) and not bool((slopes.abs() <= LARGEST).all()):
        raise ValueError(f"alibi_slopes must hold numbers between {-LARGEST} and {LARGEST}")
    return slopes if slopes.dim() == 2 else slopes[None]
