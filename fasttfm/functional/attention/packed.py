"""Attention over packed sequences: no padding, and no length ever read by the host."""

from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.attention.arguments import Options, Sequences, Window
from fasttfm.functional.attention.checks import checked_sequences
from fasttfm.functional.attention.operator import attend, attention
from fasttfm.functional.attention.scoring import Causal, scores_differ, with_scoring
from fasttfm.functional.dropout import LEAST_P, draw_seed
from fasttfm.functional.signature import names_arguments


@names_arguments
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: Causal = False,
    causal_offset: int | Tensor = 0,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """attention() over packed sequences: queries and keys of all sequences one after the other, without padding.

    query (Tq, H, D), key (Tk, Hk, D), value (Tk, Hk, Dv); float32, float16 or bfloat16, one dtype, any strides; H a
    multiple of Hk, as attention() has it.
    cu_seqlens_q, cu_seqlens_k (B + 1,) int32 or int64 on the same device: where each sequence begins, and the end of
    the last. max_seqlen_q, max_seqlen_k: no sequence has more queries or keys. The numbers in cu_seqlens are checked on
    a CPU, and trusted on a GPU, where the host would have to wait for them, unless FASTTFM_CHECK=1 is in the
    environment. Rows past the last sequence are filler of a fixed token budget and give zeros.
    The others are as attention() takes them; causal="bottom_right" looks at each sequence's own lengths, and the
    dropout mask is that of the padded batch. Lengths are in cu_seqlens, and there is no mask: pad, and use attention(),
    for one. Returns (Tq, H, Dv). Raises ValueError for shapes, dtypes or numbers that do not agree, TypeError for a
    window that is not two numbers.
    """
    if key is None or value is None:
        raise TypeError("key and value must be tensors")
    seed = None if dropout_p <= LEAST_P else draw_seed(query.device) if seed is None else seed
    if scale is None:
        scale = (query.shape[-1] or 1) ** -0.5
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scored = scores_differ(causal, causal_offset, window, softcap, alibi_slopes, sinks)
    if scored or cu_seqlens_q.is_cpu or backends.checks_on_gpu:
        sequences = checked_sequences(query, key, value, sequences)
    if scored:
        options = Options.of(query, None, None, causal, causal_offset, dropout_p, scale, seed, site)
        shape = (sequences.batch, query.shape[1], *sequences[2:])
        surplus = 0 if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.diff() - cu_seqlens_q.diff()
        options = with_scoring(options, query, shape, causal, window, softcap, alibi_slopes, sinks, surplus)
        return attend(query, key, value, options=options, sequences=sequences, route=backends.current)
    return attention(  # of other types causal and its offset are refused
        query, key, value, None, None, None, sequences[0], sequences[1], None, None, None, None, seed, sequences[2],
        sequences[3], causal, causal_offset, -1, 0.0, 0, dropout_p, scale * 1.0, site, False, backends.current,
    )[0]  # fmt: skip
