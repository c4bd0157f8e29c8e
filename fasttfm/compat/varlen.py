"""Drop-in for torch.nn.attention.varlen, on every device, with dropout, which it lacks (pytorch#179390)."""

from typing import Any

from torch import Tensor

from fasttfm.compat.shared import Window, check_heads, check_rank, packed_probabilities, scoring, surplus_of, used_rows
from fasttfm.functional import varlen_attention
from fasttfm.functional.attention.call import Sequences
from fasttfm.functional.signature import is_flag, names_arguments


@names_arguments(
    cu_seqlens_q="cu_seq_q", cu_seqlens_k="cu_seq_k", max_seqlen_q="max_q", max_seqlen_k="max_k", window="window_size",
    k="key", v="value",
)  # fmt: skip
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed sequences: query (Tq, H, D), key and value (Tk, Hk, D), cu_seq_q, cu_seq_k (B + 1,) int32.

    window_size (left, right): keys before and past the diagonal that a query sees, the last query at the last key; -1
    is no bound, (-1, 0) causal. seqused_k (B,): use only so many keys of each sequence. block_table (B, pages per
    sequence): key and value are pages (P, page, Hk, D), seqused_k gives the lengths, and cu_seq_k is ignored. Both copy
    rows, and gradients pass. cu_seq_k None: cu_seq_q. num_splits is ignored: results never depend on a split. dropout_p
    in [0, 1] is an extension. Returns (Tq, H, D), and with return_aux.lse also the log-sum-exp (H, Tq) float32 of the
    scores. Raises ValueError for arguments that do not agree.
    """
    name = "varlen_attn"
    is_flag("enable_gqa", enable_gqa)
    check_rank(name, 3, query=query)
    check_rank(name, 3 if block_table is None else 4, key=key, value=value)
    if key.shape[-2] != query.shape[-2] and not enable_gqa:
        raise ValueError(
            f"{name}: {query.shape[-2]} query heads and {key.shape[-2]} key heads: give enable_gqa=True to share them"
        )
    check_heads(name, query=query, key=key, value=value)
    if block_table is not None:
        check_rank(name, 2, block_table=block_table)
        if seqused_k is None:
            raise ValueError(f"{name}: block_table needs seqused_k, the keys of each sequence")
    cu_seq_k = cu_seq_q if cu_seq_k is None else cu_seq_k
    if seqused_k is not None:
        check_rank(name, 1, cu_seq_q=cu_seq_q)
        batch, held = len(cu_seq_q) - 1, cu_seq_k if block_table is None else None
        key, value, cu_seq_k = used_rows(name, key, value, batch, held, seqused_k, block_table, max_k)
    sequences = Sequences(cu_seq_q, cu_seq_k, max_q, max_k)
    options = scoring(name, False, window_size, (max_q, max_k), None, surplus_of(cu_seq_q, cu_seq_k))
    output = varlen_attention(query, key, value, *sequences, dropout_p=dropout_p, scale=scale, **options)
    if return_aux is None or not return_aux.lse:
        return output
    return output, packed_probabilities(query, key, sequences, 0.0, None, {"scale": scale, **options})[0]
