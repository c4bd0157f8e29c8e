"""torch.nn.attention.varlen's signature, on every device, with the dropout that it lacks (pytorch#179390)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fasttfm.compat.arguments import Window, check_heads, check_rank, places, refuse, surplus_of
from fasttfm.functional import varlen_attention
from fasttfm.functional.signature import is_flag, names_arguments, own_names


@own_names(query_starts="cu_seq_q", key_starts="cu_seq_k", max_query="max_q", max_key="max_k", window="window_size")
@names_arguments
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: Window = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention over packed sequences: query (Tq, H, D), key and value (Tk, Hk, D), starts (B + 1,) int32.

    window_size (left, right): keys that a query sees before and past its own, the last query at the last key; -1 is no
    bound, and (-1, 0) causal. return_aux, seqused_k and block_table raise ValueError. cu_seq_k None: those of the
    queries. num_splits changes nothing: results never depend on a split. dropout_p in [0, 1] is an addition. Returns
    (Tq, H, D).
    """
    name = "varlen_attn"
    is_flag("enable_gqa", enable_gqa)
    check_rank(name, 3, query=query, key=key, value=value)
    refuse(name, return_aux=(return_aux, None), seqused_k=(seqused_k, None), block_table=(block_table, None))
    if key.shape[-2] != query.shape[-2] and not enable_gqa:
        raise ValueError(
            f"{name}: {query.shape[-2]} query heads and {key.shape[-2]} key heads: give enable_gqa=True to share them"
        )
    check_heads(name, query=query, key=key, value=value)
    cu_seq_k = cu_seq_q if cu_seq_k is None else cu_seq_k
    return varlen_attention(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        dropout_p=dropout_p,
        scale=scale,
        **places(name, False, window_size, (max_q, max_k), None, surplus_of(cu_seq_q, cu_seq_k)),
    )
