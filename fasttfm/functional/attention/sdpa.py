"""Drop-in for torch.nn.functional.scaled_dot_product_attention."""

import torch
from torch import Tensor

from fasttfm.functional.attention.api import attention
from fasttfm.functional.attention.arguments import shares
from fasttfm.functional.operator import casts
from fasttfm.functional.signature import is_flag, names_arguments
from fasttfm.functional.subclasses import ordinary


@names_arguments(mask="attn_mask", causal="is_causal")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """attention() with the arguments, meaning and errors of torch.nn.functional.scaled_dot_product_attention.

    query (..., Hq, L, E), key (..., H, S, E), value (..., H, S, Ev), whose leading dimensions broadcast; attn_mask
    broadcastable to (..., Hq, L, S): bool (True attends), added if float32 or of query's dtype, or a CausalBias;
    is_causal is aligned top-left. Nested tensors and unsupported tensor subclasses fall back to torch. enable_gqa: Hq
    is a multiple of H, and each key head serves Hq / H query heads. dropout_p always applies, as in torch. Returns
    (..., Hq, L, Ev). Raises RuntimeError if is_causal and attn_mask are both given, ValueError for shapes or dtypes
    that do not agree.
    """
    is_flag("enable_gqa", enable_gqa)
    if not ordinary(query, key, value) or not (ordinary(attn_mask) or type(attn_mask).__name__ == "CausalBias"):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if is_causal and attn_mask is not None:
        raise RuntimeError(
            "attn_mask and is_causal are both given: fold the triangle into attn_mask, or give one of them"
        )
    dtype = query.dtype if attn_mask is None else attn_mask.dtype
    if dtype not in (torch.bool, torch.float32, query.dtype) and dtype.is_floating_point and not casts(query):
        raise ValueError(f"attn_mask has dtype {dtype} and query {query.dtype}: bool, float32 or query's is needed")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} need at least the "
            "dimensions (L, E), (S, E) and (S, Ev)"
        )
    if enable_gqa and _share(query, key, value):  # heads do not broadcast; leading dimensions do
        batch = _broadcast(query, key, value, 3)
        leading = torch.Size((*batch, query.shape[-3]))
        query, key, value = (_four(x, torch.Size((*batch, x.shape[-3]))) for x in (query, key, value))
    else:
        leading = _broadcast(query, key, value, 2)
        query, key, value = (_four(x, leading) for x in (query, key, value))
    if attn_mask is not None and attn_mask.dim() > 2 and len(leading) != 2:
        full = torch.Size((*leading, query.shape[2], key.shape[2]))
        if attn_mask.dim() > len(full) or any(m not in (1, f) for m, f in zip(attn_mask.shape[::-1], full[::-1])):
            raise ValueError(f"attn_mask {tuple(attn_mask.shape)} does not broadcast to (..., L, S) = {tuple(full)}")
        attn_mask = _four(attn_mask, leading)
    output = attention(query, key, value, mask=attn_mask, causal=is_causal, dropout_p=dropout_p, scale=scale)
    return output.reshape(*leading, *output.shape[-2:])


def _broadcast(query: Tensor, key: Tensor, value: Tensor, last: int) -> torch.Size:
    """The broadcast shape of all but the last dimensions."""
    try:
        return torch.broadcast_shapes(*(x.shape[:-last] for x in (query, key, value)))
    except RuntimeError:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must broadcast in all "
            f"but their last {last} dimensions"
        ) from None


def _share(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether query heads share key heads. Raises ValueError for numbers of heads that cannot."""
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
    if min(x.dim() for x in (query, key, value)) < 3 or heads[1] != heads[2] or not shares(*heads[:2]):
        raise ValueError(
            f"enable_gqa: query {tuple(query.shape)} needs a multiple of the heads (third dimension from the right) of "
            f"key {tuple(key.shape)} and value {tuple(value.shape)}, which need equally many"
        )
    return heads[0] != heads[1]


def _four(x: Tensor, leading: torch.Size) -> Tensor:
    """x (..., M, N) as (B, H, M, N); leading: the broadcast shape of its leading dimensions."""
    x = x.expand(*leading, *x.shape[-2:])
    if len(leading) == 2:
        return x
    heads = leading[-1] if leading else 1
    return x.reshape(leading[:-1].numel(), heads, *x.shape[-2:])
