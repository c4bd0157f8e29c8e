"""The mathematics of the Transformer in plain PyTorch: the specification that every kernel is tested against.

Read it next to the paper (Vaswani et al. 2017). Autograd differentiates it; it imports only torch. Shape letters: B
batch, H heads, L and S target and source length, D and Dv head size, M rows, N columns, V vocabulary, T packed tokens.
Scores and statistics (mean, variance, log-sum-exp, loss) are float32 for half-precision input, else in the input's
precision.
"""

import math
from typing import Any

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------- dropout

_WORD = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_CHUNK_BLOCKS = 65536  # Philox blocks per chunk: enough for two threads, and they fit the cache


def dropout_threshold(p: float) -> int:
    """The number of byte values, out of 256, that dropout drops. Raises ValueError unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p {p} must lie in [0, 1]")
    return round(p * 256)


def dropout_scale(p: float) -> float:
    """The factor of kept values: one over the exact keep probability; 0 if nothing is kept."""
    threshold = dropout_threshold(p)
    return 256 / (256 - threshold) if threshold < 256 else 0.0


def _philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7 (Salmon et al. 2011) on int64 tensors of 32-bit words, which broadcast.

    seed (1,) int64. Only the lower 32 bits of the results are valid.
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c2 = _mix(b, c1, k0), _mix(a, c3, k1)
        c1, c3 = b, a  # the next mix or the caller discards their upper halves
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _mix(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    """(product >> 32) ^ word ^ key, in 32 bits; in place if no operand is broadcast."""
    high = product >> 32
    high = high.bitwise_xor_(word) if high.shape == word.shape else high ^ word
    return high.bitwise_xor_(key).bitwise_and_(_WORD)


def keep_mask(shape: tuple[int, int, int], p: float, seed: Tensor, site: int = 0, first_plane: int = 0) -> Tensor:
    """Mask of the elements of a (planes, rows, columns) tensor that dropout keeps, by the convention of
    kernels/philox.py.

    p in [0, 1]; seed (1,) int64; site tells the dropouts of one model apart; first_plane: index of the first plane.
    Returns a bool tensor of that shape on seed's device.
    """
    planes, rows, columns = shape
    device = seed.device
    threshold = dropout_threshold(p)
    if threshold in (0, 256):
        return torch.full(shape, threshold == 0, dtype=torch.bool, device=device)
    blocks = (columns + 15) // 16
    column = torch.arange(blocks, device=device).view(1, 1, blocks)
    plane = torch.arange(first_plane, first_plane + planes, device=device).view(planes, 1, 1)
    call = torch.full((1, 1, 1), site, device=device)
    lanes = torch.empty(planes, rows, blocks, 2, dtype=torch.int64, device=device)
    step = max(1, _CHUNK_BLOCKS // max(1, blocks))  # rows at a time, over as many planes as fit
    planes_at_once = max(1, step // max(1, rows))
    for p0 in range(0, planes, planes_at_once):
        for r0 in range(0, rows, step):
            row = torch.arange(r0, min(r0 + step, rows), device=device).view(1, -1, 1)
            w0, w1, w2, w3 = _philox(seed, column, row, plane[p0 : p0 + planes_at_once], call)
            into = lanes[p0 : p0 + planes_at_once, r0 : r0 + step]
            # Little-endian: the eight bytes of an int64 are the lanes in order.
            torch.bitwise_or(w0, w1 << 32, out=into[..., 0])
            torch.bitwise_or(w2, w3 << 32, out=into[..., 1])
    lanes = lanes.view(torch.uint8).view(planes, rows, blocks * 16)
    torch.ge(lanes, threshold, out=lanes)  # a direct result in bool is slower on the CPU
    return lanes.view(torch.bool)[..., :columns]


def dropout(x: Tensor, p: float, seed: Tensor | None, site: int = 0) -> Tensor:
    """Inverted dropout on x (..., N), with rows indexed through all leading dimensions.

    seed (1,) int64; None: no dropout, as at inference.
    """
    if seed is None or p == 0.0:
        return x
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    keep = keep_mask((1, rows, x.shape[-1]), p, seed, site).view(x.shape)
    return x * keep * dropout_scale(p)


# -------------------------------------------------------------------------------------------------------- attention

LOWEST = torch.finfo(torch.float32).min / math.log2(math.e)
"""About -2.36e38: an additive mask below it hides a key, since kernels compute in base 2, where it is -inf."""


def attention_mask(
    scores: Tensor,
    *,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool | str = False,
    causal_offset: int | Tensor = 0,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Set scores (B, H, L, S) to -inf where a query may not attend; add an additive mask and ALiBi's biases.

    key_lengths (B,): keys at or past it are hidden. mask broadcastable to (B, H, L, S): bool, True where the query may
    attend, or floats that are added, and hide below LOWEST. The diagonal aligns query i with key i + causal_offset, an
    int or (B,) per batch row; causal="bottom_right" aligns the last query with the last key. causal: no keys past the
    diagonal. window (left, right): at most so many keys before and past the diagonal, None for no bound (Beltagy et al.
    2020, section 3.1; Jiang et al. 2023, section 2). alibi_slopes (H,) or (B, H): slope times the distance from the
    diagonal is subtracted (Press et al. 2022, section 3).
    """
    *_, queries, keys = scores.shape
    key = torch.arange(keys, device=scores.device)
    lengths = None if key_lengths is None else key_lengths.view(-1, 1, 1, 1)
    offset = causal_offset.view(-1, 1, 1, 1) if isinstance(causal_offset, Tensor) else causal_offset
    if causal == "bottom_right":
        visible = keys if lengths is None else lengths.clamp(0, keys)
        offset = offset + visible - queries
    past = key - torch.arange(queries, device=scores.device)[:, None] - offset  # signed distance from the diagonal
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None].to(scores.dtype) * past.abs()
    if mask is not None and mask.dtype != torch.bool:
        scores = (scores + mask).masked_fill(mask < LOWEST, -math.inf)
    elif mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    left, right = window or (None, None)
    if causal:
        scores = scores.masked_fill(past > 0, -math.inf)
    if right is not None:
        scores = scores.masked_fill(past > right, -math.inf)
    if left is not None:
        scores = scores.masked_fill(past < -left, -math.inf)
    if lengths is not None:
        scores = scores.masked_fill(key >= lengths, -math.inf)
    return scores


def masked_softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """softmax over the last dimension; a row of -inf gives zeros and no gradient.

    sinks (H,): an extra score per head that takes weight from a row and has no value, so that the weights sum to less
    than 1 (gpt-oss; Xiao et al. 2024, section 3.3): no weight if -inf, all if inf.
    """
    keys = scores.shape[-1]
    if sinks is not None:
        sink = sinks.to(scores.dtype).clamp(max=min(1e30, torch.finfo(scores.dtype).max))  # inf - inf is NaN
        sink = sink.view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)[..., :keys]


def attention_scores(
    query: Tensor, key: Tensor, *, scale: float | None = None, softcap: float = 0.0, **masks: Any
) -> Tensor:
    """Q K^T * scale (B, H, L, S), capped and masked, at least float32: the input of attention()'s softmax.

    query (B, H, L, D), key (B, Hk, S, D); scale defaults to D^-0.5. Hk divides H: H / Hk neighbouring query heads share
    a key head (Ainslie et al. 2023, section 2.2). softcap c, if not 0, bounds the scores by c tanh(score / c), before
    anything is added (Gemma 2, 2024, section 2). masks: attention_mask()'s arguments.
    """
    key = key.repeat_interleave(query.shape[1] // max(1, key.shape[1]), dim=1)
    scores = _wide(query) @ _wide(key).transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return attention_mask(scores, **masks)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    first_plane: int = 0,
    **scoring: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T * scale) V (equation 1), with dropout on the weights.

    query (B, H, L, D), key (B, Hk, S, D), value (B, Hk, S, Dv); scoring: attention_scores()'s options.
    Returns the output (B, H, L, Dv) and the weights before dropout (B, H, L, S). A query without a key gives zeros.
    """
    batch, heads, queries, _ = query.shape
    value = value.repeat_interleave(heads // max(1, value.shape[1]), dim=1)
    weights = masked_softmax(attention_scores(query, key, **scoring), sinks).to(query.dtype)  # (B, H, L, S)
    kept = weights
    if seed is not None and dropout_p > 0.0:
        shape = (batch * heads, queries, key.shape[-2])
        keep = keep_mask(shape, dropout_p, seed, site, first_plane).view(weights.shape)
        kept = weights * keep * dropout_scale(dropout_p)
    return kept @ value, weights


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal_offset: int | Tensor = 0,
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """attention() over packed sequences; options are those of attention(), without masks.

    query (Tq, H, D), key (Tk, H, D), value (Tk, H, Dv); cu_seqlens_q, cu_seqlens_k (B + 1,) int32: the start of each
    sequence, and the end of the last. Returns (Tq, H, Dv). The dropout mask is that of the padded batch.
    """
    heads = query.shape[1]
    outputs = []
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(q_starts) - 1):
        q = query[q_starts[b] : q_starts[b + 1]].transpose(0, 1)[None]  # (1, H, L, D)
        k = key[k_starts[b] : k_starts[b + 1]].transpose(0, 1)[None]
        v = value[k_starts[b] : k_starts[b + 1]].transpose(0, 1)[None]
        offset = causal_offset[b : b + 1] if isinstance(causal_offset, Tensor) else causal_offset
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        output, _ = attention(
            q, k, v, causal_offset=offset, alibi_slopes=slopes, first_plane=b * heads, **options
        )  # fmt: skip
        outputs.append(output[0].transpose(0, 1))
    used = q_starts[-1]  # rows past the last sequence pad to a fixed token budget
    tail = query.new_zeros(query.shape[0] - used, heads, value.shape[-1])
    return torch.cat([*outputs, tail])


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """Rotary position embedding (Su et al. 2021, equation 34): rotates pairs of a head's elements.

    x (B, H, L, D); cos, sin (P, R / 2) of each position's angles; positions (L,) or (B, L), None: 0, 1, ...
    Pairs are elements (i, i + R / 2), or if interleaved (2i, 2i + 1); elements from R on are unchanged.
    """
    positions = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
    cos, sin = (table[positions].unsqueeze(-3).to(_wide(x).dtype) for table in (cos, sin))  # (1 or B, 1, L, R / 2)
    rotated, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    rotated = _wide(rotated)
    first, second = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


# ----------------------------------------------------------------------------------------------- LayerNorm and FFN


def _wide(x: Tensor) -> Tensor:
    """x in float32 if it is half precision, else x."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016). Same dtype as x."""
    wide = _wide(x)
    mean = wide.mean(dim=-1, keepdim=True)
    variance = (wide - mean).square().mean(dim=-1, keepdim=True)  # biased, as torch.nn.LayerNorm
    y = (wide - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        y = y * weight.expand_as(y)  # jacrev(grad()) of a product that broadcasts is an internal error of torch.func
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def residual_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, **dropout: Any
) -> tuple[Tensor, Tensor]:
    """s = residual_add(x, residual, **dropout), y = layer_norm(s); returns (y, s), y in x's dtype, s in residual's.

    x, residual (..., N). Post-norm, the paper's, uses only y; pre-norm carries s on and gives y to the next sub-layer.
    """
    s = residual_add(x, residual, **dropout)
    return layer_norm(s, weight, bias, eps).to(x.dtype), s


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019). Same dtype as x."""
    wide = _wide(x)
    y = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.expand_as(y)).to(x.dtype)  # expanded as in layer_norm()


def residual_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6, **dropout: Any
) -> tuple[Tensor, Tensor]:
    """s = residual_add(x, residual, **dropout), y = rms_norm(s); returns (y, s), y in x's dtype, s in residual's."""
    s = residual_add(x, residual, **dropout)
    return rms_norm(s, weight, eps).to(x.dtype), s


def residual_add(
    x: Tensor, residual: Tensor, *, dropout_p: float = 0.0, seed: Tensor | None = None, site: int = 0
) -> Tensor:
    """residual + dropout(x), in residual's dtype: the end of a pre-norm stack without a final norm."""
    return (_wide(residual) + dropout(_wide(x), dropout_p, seed, site)).to(residual.dtype)


def gelu(x: Tensor, *, tanh: bool = False) -> Tensor:
    """x * Phi(x), Phi the normal CDF (Hendrycks and Gimpel 2016), or its tanh approximation; any shape."""
    wide = _wide(x)
    if tanh:
        phi = 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)))
    else:
        phi = 0.5 * (1.0 + torch.erf(wide * math.sqrt(0.5)))
    return (wide * phi).to(x.dtype)


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    activation: str = "relu",
) -> Tensor:
    """max(0, x W1^T + b1) W2^T + b2 (equation 2), with dropout on the hidden activation (tensor2tensor).

    x (..., N); weight1 (F, N), bias1 (F,), weight2 (N', F), bias2 (N',), laid out as torch.nn.Linear's. activation:
    relu (max(0, .)), gelu, gelu_tanh or silu (x / (1 + exp(-x))).
    """
    hidden = torch.nn.functional.linear(x, weight1, bias1)
    if activation == "relu":
        hidden = hidden.relu()
    elif activation in ("gelu", "gelu_tanh"):
        hidden = gelu(hidden, tanh=activation == "gelu_tanh")
    elif activation == "silu":
        hidden = (_wide(hidden) / (1.0 + torch.exp(-_wide(hidden)))).to(hidden.dtype)
    else:
        raise ValueError(f"activation {activation!r} is unknown: choose relu, gelu, gelu_tanh or silu")
    return torch.nn.functional.linear(dropout(hidden, dropout_p, seed, site), weight2, bias2)


# ------------------------------------------------------------------------------------------- embedding and loss


def positional_encoding(
    length: int, width: int, variant: str = "paper", *, first: int = 0, dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
    """The sinusoids for positions first ... first + length - 1, (length, width).

    paper: PE(pos, 2i) = sin(pos / 10000^(2i/width)), PE(pos, 2i+1) = cos of the same (section 3.5).
    tensor2tensor: channels i < width/2 hold sin(pos / 10000^(i / (width/2 - 1))), the other half the cosines.
    Computed in float64, then rounded once; on PyTorch's default device if none is given.
    """
    if variant not in ("paper", "tensor2tensor"):
        raise ValueError(f"positional encoding {variant!r} is unknown: choose paper or tensor2tensor")
    if width % 2:
        raise ValueError(f"width {width} is odd: the positional encoding needs pairs of channels")
    position = torch.arange(first, first + length, dtype=torch.float64, device=device)[:, None]
    i = torch.arange(width // 2, dtype=torch.float64, device=device)
    rate = 2.0 * math.log(10000.0) / width if variant == "paper" else math.log(10000.0) / max(1, width // 2 - 1)
    angle = position * torch.exp(i * -rate)
    waves = torch.stack([angle.sin(), angle.cos()], dim=-1 if variant == "paper" else -2)
    return waves.reshape(length, width).to(dtype)


def embed(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    *,
    scale: float = 1.0,
    pad_id: int | None = None,
    first_position: int = 0,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """dropout(weight[tokens] * scale + positions), zero where a token is pad_id (section 3.4, 5.4).

    tokens (B, L) int64, weight (V, N), positions (at least first_position + L, N). Returns (B, L, N) in weight's dtype.
    pad_id rows take no gradient either.
    """
    x = _wide(torch.nn.functional.embedding(tokens, weight)) * scale
    if positions is not None:
        x = x + positions[first_position : first_position + tokens.shape[-1]]
    if pad_id is not None:
        x = x.masked_fill((tokens == pad_id)[..., None], 0.0)
    return dropout(x, dropout_p, seed, site).to(weight.dtype)


def cross_entropy(
    logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy (section 5.4; torch.nn.functional.cross_entropy's definition), summed.

    logits (M, V), target (M,) int64. Returns (the loss, the loss without smoothing), both 0-d; rows whose target is
    ignore_index are ignored: loss = sum over rows of -(1 - a) log p[target] - a / V * sum over v of log p[v].
    """
    counted = target != ignore_index
    log_p = torch.log_softmax(_wide(logits), dim=-1)
    nll = -log_p.gather(-1, target.masked_fill(~counted, 0)[:, None])[:, 0]
    loss = nll
    if label_smoothing:  # without it a class of logit -inf must not make the loss NaN
        loss = (1.0 - label_smoothing) * nll - label_smoothing * log_p.mean(dim=-1)
    return loss.masked_fill(~counted, 0.0).sum(), nll.masked_fill(~counted, 0.0).sum()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """cross_entropy(hidden weight^T, target). hidden (M, N), weight (V, N)."""
    logits = torch.nn.functional.linear(hidden, weight)
    return cross_entropy(logits, target, label_smoothing=label_smoothing, ignore_index=ignore_index)
