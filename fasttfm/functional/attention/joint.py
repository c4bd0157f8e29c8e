"""Attention on queries, keys and values as one product wrote them, with a gradient that one product reads.

A model projects all three at once, to (B, L, 3, H, D). attention() takes them as three views, and autograd then copies
three gradients together. Here the gradient of the joint tensor is allocated once and the kernels write into it; over
packed sequences likewise, for a model that computes no padding anywhere.
"""

from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.attention.arguments import Sequences
from fasttfm.functional.attention.checks import checked_sequences
from fasttfm.functional.attention.operator import attention
from fasttfm.functional.attention.scoring import without_bias
from fasttfm.functional.dropout import LEAST_P, draw_seed
from fasttfm.functional.signature import names_arguments


@names_arguments
def joint_attention(
    joint: Tensor,
    query: Tensor | None = None,
    *,
    biases: tuple[Tensor, Tensor | None] | None = None,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """attention() on projections in the layout of one joint product; the heads of its output are joined.

    joint (B, L, 3, H, D): queries, keys and values; or (B, S, 2, Hk, D), keys and values, with query (B, L, H, D).
    biases: those that the projections of joint and of query have added already, (3 * H * D,) or (2 * Hk * D,) and
    (H * D,), and which take their gradients from here; a kernel has these sums in registers, where a pass over the
    gradients of joint and query would read both again.
    key_lengths, mask, causal, dropout_p, scale, seed, site as attention() takes them; but a mask takes no gradient.
    Memory may hold the batch or the positions first: gradients, and what the kernels write, are laid out as the input.
    Returns (B, L, H * D). Raises ValueError for shapes or dtypes that do not agree, and for biases with a mask, whose
    sums no kernel has the registers for.
    """
    seed = None if dropout_p <= LEAST_P else draw_seed(joint.device) if seed is None else seed
    if scale is None:
        scale = (joint.shape[-1] or 1) ** -0.5
    offset: int | Tensor = 0
    if mask is not None and type(mask) is not Tensor:
        queries = (joint if query is None else query).shape[1]
        mask, causal, offset = without_bias(mask, causal, 0, queries, joint.shape[1])  # type: ignore[assignment]
    query, key, query_bias, key_bias = _operands(joint, query, biases)
    return attention(  # of other types causal and its offset are refused
        query, key, None, query_bias, key_bias, key_lengths, None, None, mask, None, None, None, seed, 0, 0, causal,
        offset, -1, 0.0, 0, dropout_p, scale * 1.0, site, False, backends.current,
    )[0]  # fmt: skip


def _operands(
    joint: Tensor, query: Tensor | None, biases: tuple[Tensor, Tensor | None] | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The operator's query and key, and their biases."""
    of_joint, of_query = biases or (None, None)
    return (joint, None, of_joint, of_query) if query is None else (query, joint, of_query, of_joint)


@names_arguments
def joint_varlen_attention(
    joint: Tensor,
    query: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    biases: tuple[Tensor, Tensor | None] | None = None,
    covered: bool = False,
    causal: bool = False,
    causal_offset: int = 0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """varlen_attention() on projections in the layout of one joint product; the heads of its output are joined.

    joint (T, 3, H, D): queries, keys and values; or (Tk, 2, Hk, D), keys and values, with query (Tq, H, D).
    biases as joint_attention() takes them. cu_seqlens_q to site as
    varlen_attention() takes them; covered: the sequences reach to the last row, there is no filler to be zeroed.
    Returns (Tq, H * D). Raises ValueError for shapes or dtypes that do not agree.
    """
    seed = None if dropout_p <= LEAST_P else draw_seed(joint.device) if seed is None else seed
    if scale is None:
        scale = (joint.shape[-1] or 1) ** -0.5
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    query, key, query_bias, key_bias = _operands(joint, query, biases)
    if cu_seqlens_q.is_cpu or backends.checks_on_gpu:
        sequences = checked_sequences(query, key, None, sequences)
    return attention(  # of other types causal and its offset are refused
        query, key, None, query_bias, key_bias, None, sequences[0], sequences[1], None, None, None, None, seed,
        sequences[2], sequences[3], causal, causal_offset, -1, 0.0, 0, dropout_p, scale * 1.0, site, covered,
        backends.current,
    )[0]  # fmt: skip
