"""The weights of attention by themselves, softmax(Q K^T * scale), and the log-sum-exp of its scores."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional import backends
from fasttfm.functional.attention import products
from fasttfm.functional.attention.call import Options, Window
from fasttfm.functional.attention.checks import check_heads
from fasttfm.functional.attention.operator import attend
from fasttfm.functional.attention.scoring import Causal, options_of, without_bias
from fasttfm.functional.dropout import wide
from fasttfm.functional.operator import casts
from fasttfm.functional.signature import names_arguments


@names_arguments
def attention_weights(
    query: Tensor,
    key: Tensor,
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
    """The weights of attention(), dropout applied: softmax(Q K^T * scale), (B, H, L, S) in query's dtype, rounded to it
    when they have been computed in float32.

    Arguments, errors and gradients as attention()'s: attention_weights(q, k, ...) @ v is attention(q, k, v, ...)
    where no heads of keys are shared. Those of sinks are left out: a row then adds up to less than 1.
    """
    if mask is not None and type(mask) is not Tensor:
        mask, causal, causal_offset = without_bias(mask, causal, causal_offset, query.shape[2], key.shape[2])
    check_heads(query, key, key_lengths, mask)
    options = options_of(
        query, (*query.shape[:3], key.shape[2]), key_lengths=key_lengths, mask=mask, causal=causal,
        causal_offset=causal_offset, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, scale=scale, seed=seed, site=site,
    )  # fmt: skip
    return _weights(query, key, options)


def _lowered(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """compute(query, key, options) without autocast, which would make scores of half precision: of operands in its
    dtype where it is on."""

    @functools.wraps(compute)
    def call(query: Tensor, key: Tensor, options: Options) -> Tensor:
        if not casts(query):
            return compute(query, key, options)
        device = query.device.type
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return compute(*(x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key)), options)

    return call


@_lowered
def _weights(query: Tensor, key: Tensor, options: Options) -> Tensor:
    query, key, dtype = query.to(wide(query.dtype)), key.to(wide(key.dtype)), query.dtype
    return attend(query, key, key, options, backends.current, only_weights=True).to(dtype)


@torch.no_grad()
def log_sum_exp(query: Tensor, key: Tensor, key_lengths: Tensor | None = None, **scoring: Any) -> Tensor:
    """The logarithm of the sum of a row's exponentiated scores: (B, H, L) float32, -inf where a query sees no key.

    Arguments and errors as attention()'s. Computed by PyTorch, for some queries at a time.
    """
    check_heads(query, key, key_lengths, None)
    options = options_of(query, (*query.shape[:3], key.shape[2]), key_lengths=key_lengths, **scoring)
    return _lowered(products.log_sum_exp)(query, key, options)
