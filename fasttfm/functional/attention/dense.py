"""softmax(Q K^T * scale) V with masks and dropout (Vaswani et al. 2017, equation 1), as torch operators."""

from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional.attention import composed, routes
from fasttfm.functional.attention.arguments import Options, Window
from fasttfm.functional.attention.layout import empty_heads_last
from fasttfm.functional.attention.scoring import Causal, scores_differ, with_scoring, without_bias
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.operator import Gradients, Operator, Size, casts, lowered, unplanned
from fasttfm.functional.signature import names_arguments

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
    if mask is not None and type(mask) is not Tensor:
        mask, causal, causal_offset = without_bias(mask, causal, causal_offset, query.shape[2], key.shape[2])
    check(query, key, key_lengths, mask)
    check_value(query, key, value)
    options = Options.of(query, key_lengths, mask, causal, causal_offset, dropout_p, scale, seed, site)
    if scores_differ(causal, causal_offset, window, softcap, alibi_slopes, sinks):
        shape = (*query.shape[:3], key.shape[2])
        options = with_scoring(options, query, shape, causal, window, softcap, alibi_slopes, sinks)
    route = routes.asked(query, key, value, options)
    if route != "blocks":
        if not options.plain and not routes.kernels_score(route, query):
            _operator.check(_Call(query, key, value, options, route))
            return composed.attention(query, key, value, options, fused)
        if routes.takes_fused(query, key, value, mask, scale=options.scale, seed=options.seed):
            route = "fused"
    return _attention(query, key, value, options, route)[0]


def fused(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """attention() by torch's own CPU kernel, where routes.takes_fused() says so."""
    return _attention(query, key, value, options, "fused")[0]


def check(query: Tensor, key: Tensor, key_lengths: Tensor | None, mask: Tensor | None) -> None:
    """Raises ValueError for arguments of attention() that do not agree."""
    q, k = query.shape, key.shape  # each asking makes a tuple anew
    if len(q) != 4 or len(k) != 4:
        raise ValueError(
            f"query {tuple(q)} and key {tuple(k)} must have four dimensions: (B, H, L, D) and (B, H, S, D)"
        )
    if q[0] != k[0] or q[3] != k[3] or not shares(q[1], k[1]):
        raise ValueError(
            f"query {tuple(q)} and key {tuple(k)} must agree in batch, heads and head size "
            "(only the query may have a multiple of the key's heads)"
        )
    if q[3] == 0:
        raise ValueError(f"query {tuple(q)} has heads of size 0: there is nothing to multiply")
    if query.device != key.device:
        raise ValueError(f"key is on {key.device} and query on {query.device}: both must be on one device")
    if query.dtype != key.dtype and not casts(query):
        raise ValueError(f"query {query.dtype} and key {key.dtype} must have one dtype")
    if query.dtype not in _DTYPES:
        raise ValueError(f"query has dtype {query.dtype}: float32, float16 or bfloat16 is needed")
    if key_lengths is not None or mask is not None:
        _check_masks(query, key, key_lengths, mask)


def shares(query_heads: Size, key_heads: Size) -> bool:
    """Return whether so many query heads can share so many heads of keys: equal numbers, or a multiple."""
    return query_heads == key_heads or (key_heads > 0 and query_heads % key_heads == 0)


def check_value(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError for values that do not fit the queries and keys."""
    k, v = key.shape, value.shape
    if len(v) != 4 or v[:3] != k[:3]:
        raise ValueError(
            f"value {tuple(v)} and key {tuple(k)} must agree in batch, heads and length: (B, H, S, Dv) and (B, H, S, D)"
        )
    if query.dtype != value.dtype and not casts(query):
        raise ValueError(f"query {query.dtype} and value {value.dtype} must have one dtype")


def _check_masks(query: Tensor, key: Tensor, key_lengths: Tensor | None, mask: Tensor | None) -> None:
    for name, given in (("key_lengths", key_lengths), ("mask", mask)):
        if given is not None and given.device != query.device:
            raise ValueError(f"{name} is on {given.device} and query on {query.device}: both must be on one device")
    if key_lengths is not None and (key_lengths.dim() != 1 or key_lengths.shape[0] != query.shape[0]):
        raise ValueError(f"key_lengths {tuple(key_lengths.shape)} must be ({query.shape[0]},), one length a batch row")
    if key_lengths is not None and key_lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"key_lengths has dtype {key_lengths.dtype}: int32 or int64 is needed")
    if mask is not None:
        full = (*query.shape[:3], key.shape[2])
        if mask.dim() > 4 or any(m not in (1, f) for m, f in zip(mask.shape[::-1], full[::-1])):
            raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to (B, H, L, S) = {full}")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask has dtype {mask.dtype}: bool (True attends) or floats that are added are needed")


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    options: Options
    route: str


class _Saved(NamedTuple):
    call: _Call
    output: Tensor
    """Empty where the weights are saved and there are no sinks."""
    saved: Tensor
    """The weights before dropout or the log-sum-exp, as routes.saves_weights() says."""
    kept: Tensor
    """What routes.forward() gives beside."""


class _Backward(NamedTuple):
    grad: Tensor
    saved: _Saved
    mask_gradient: bool


def _compute(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    output, saved, kept = routes.forward(call.route, call.query, call.key, call.value, call.options)
    return output, saved, output.new_empty(0) if kept is None else kept


def _differentiate(saved: _Saved, wanted: Options, grad: Tensor, *_: None) -> Gradients:
    d_query, d_key, d_value, d_mask, d_sinks = _attention_backward(grad, saved, wanted.mask is True)
    return {
        "query": d_query,
        "key": d_key,
        "value": d_value,
        "mask": d_mask if wanted.mask else None,
        "sinks": d_sinks if wanted.sinks else None,
    }


def _compute_backward(call: _Backward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (query, key, value, options, route), output, saved, kept = call.saved
    d_query, d_key, d_value, d_mask = routes.backward(
        route, call.grad, query, key, value, output, saved, kept, options, mask_gradient=call.mask_gradient
    )
    sinks = options.sinks
    d_sinks = (
        query.new_empty(0) if sinks is None else routes.sinks_gradient(route, call.grad, output, saved, kept, sinks)
    )
    return d_query, d_key, d_value, query.new_empty(0) if d_mask is None else d_mask, d_sinks


def _fake_backward(call: _Backward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, options, _ = call.saved.call
    mask = options.mask
    d_mask = mask.new_empty(mask.shape) if mask is not None and call.mask_gradient else query.new_empty(0)
    d_query, d_key, d_value = (empty_heads_last(x, x.shape[-1]) for x in (query, key, value))
    sinks = options.sinks
    return d_query, d_key, d_value, d_mask, query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _by_reference(call: _Call) -> Tensor:
    return reference.attention(*call[:3], **call.options.of_reference())[0]


def pairs(query: Tensor, key: Tensor) -> int:
    """Queries (B, H, L, D) times the keys (B, Hk, S, D) of each."""
    return query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]


def _flops(call: _Call, backward: bool = False) -> int:
    query, key, value, _, route = call
    return routes.flops(pairs(query, key), query.shape[3], value.shape[3], route if backward else None)


_attention_backward = Operator(
    "attention_backward", _Backward, "(Tensor, Tensor, Tensor, Tensor, Tensor)", unplanned(_compute_backward), _fake_backward,
    reference=lambda call: pulled_back(
        _by_reference, call.saved.call, ("query", "key", "value", "mask", "sinks"), call.grad
    ),
    flops=lambda call: _flops(call.saved.call, backward=True),
).call  # fmt: skip
_operator = Operator(
    "attention",
    _Call,
    "(Tensor, Tensor, Tensor)",
    unplanned(_compute, 2),
    lambda call: routes.fake(call.route, call.query, call.key, call.value, call.options),
    decide=lambda call: routes.decide(call.route, call.query, call.value, call.key.shape[2], call.options),
    save=routes.save,
    saved=_Saved,
    backward=_differentiate,
    flops=_flops,
    rows=("query", "key", "value", "key_lengths"),
    autocast=lowered("query", "key", "value"),  # an additive mask keeps its precision
)
_attention = _operator.call
