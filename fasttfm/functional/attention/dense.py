"""softmax(Q K^T * scale) V with masks and dropout (Vaswani et al. 2017, equation 1)."""

from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.attention.arguments import Options, Window
from fasttfm.functional.attention.checks import check_heads, check_value
from fasttfm.functional.attention.operator import attend
from fasttfm.functional.attention.operator import attention as operator
from fasttfm.functional.attention.scoring import Causal, scores_differ, with_scoring, without_bias
from fasttfm.functional.dropout import LEAST_P, draw_seed
from fasttfm.functional.signature import names_arguments


@names_arguments
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
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
    """softmax(Q K^T * scale) V with masking and dropout fused (Vaswani et al. 2017, equation 1).

    query (B, H, L, D), key (B, Hk, S, D), value (B, Hk, S, Dv); float32, float16 or bfloat16, one dtype, any strides.
    Hk divides H: H / Hk neighbouring query heads share a head of keys and values (grouped-query attention, Ainslie et
    al. 2023; multi-query attention where Hk is 1), which is read where it is and never repeated in memory.
    key_lengths (B,) int: keys at or past it are not attended. mask, broadcastable to (B, H, L, S): bool, True where
    the query may attend, or floats that are added to the scaled scores and may take a gradient; below -2.36e38 they
    hide a key, as -inf does.
    causal: query i sees keys up to the diagonal, which is at key i + causal_offset, an int or (B,) int of each batch
    row; causal="bottom_right" moves it such that the last query is at the last key, of key_lengths where given.
    window (left, right): query i sees no more than so many keys before the diagonal and past it, None for no bound
    (Beltagy et al. 2020); what no query of a tile sees is not computed by a kernel.
    softcap, above 0: scores become softcap * tanh(score / softcap), before anything is added (Gemma 2, 2024).
    alibi_slopes (H,) or (B, H): slope times a key's distance from the diagonal is subtracted (Press et al. 2022).
    sinks (H,): a score of each head that takes weight from a row's keys and has no value, none where it is -inf, all
    where it is inf; may take a gradient (Xiao et al. 2024; gpt-oss). All combine. A query with no key to attend gives
    zeros and passes no gradient.
    dropout_p in [0, 1], on the weights; seed (1,) int64 on the same device, drawn from torch's generator where None;
    site, below 2^31, tells the calls of one model apart. scale defaults to D^-0.5.
    Returns (B, H, L, Dv) whose memory is (B, L, H, Dv), so that .transpose(1, 2).flatten(2) copies nothing.
    Raises ValueError for shapes, dtypes or numbers that do not agree, TypeError for a window that is not two numbers.
    """
    if key is None or value is None:
        raise TypeError("key and value must be tensors")
    seed = None if dropout_p <= LEAST_P else draw_seed(query.device) if seed is None else seed
    if scale is None:
        scale = (query.shape[-1] or 1) ** -0.5
    if mask is not None and type(mask) is not Tensor:
        mask, causal, causal_offset = without_bias(mask, causal, causal_offset, query.shape[2], key.shape[2])
    if (
        window is not None or softcap != 0.0 or alibi_slopes is not None or sinks is not None
        or type(causal) is not bool or type(causal_offset) is not int
    ) and scores_differ(causal, causal_offset, window, softcap, alibi_slopes, sinks):  # fmt: skip
        check_heads(query, key, key_lengths, mask)
        check_value(query, key, value)
        options = Options.of(query, key_lengths, mask, causal, causal_offset, dropout_p, scale, seed, site)
        shape = (*query.shape[:3], key.shape[2])
        options = with_scoring(options, query, shape, causal, window, softcap, alibi_slopes, sinks)
        return attend(query, key, value, options=options, route=backends.current)
    return operator(  # of other types causal and its offset are refused
        query, key, value, None, None, key_lengths, None, None, mask, None, None, None, seed, 0, 0, causal,
        causal_offset, -1, 0.0, 0, dropout_p, scale * 1.0, site, False, backends.current,
    )[0]  # fmt: skip
