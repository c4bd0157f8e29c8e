"""Our kernels as the flash backend of scaled_dot_product_attention, where FlashAttention-3 and -4 plug in.

    from fasttfm.compat import sdpa

    sdpa.register()                                                      # registers with torch, changes nothing
    torch.nn.attention.activate_flash_attention_impl("fasttfm")          # all SDPA calls that take the flash backend
    torch.nn.attention.restore_flash_attention_impl()                    # torch's own again

torch's flash backend takes CUDA tensors of half precision without a mask, with dropout, causal, and shared heads.
Not run on a GPU: tests/compat/test_sdpa.py runs the same operators and their gradients on a CPU.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fasttfm.errors import UserError
from fasttfm.functional.attention.arguments import check_heads, check_value, options_of
from fasttfm.functional.attention.backend import backend_of
from fasttfm.functional.attention.call import KERNELS, Options

NAME = "fasttfm"
_LOG2E = math.log2(math.e)
_Forward = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]


def register() -> None:
    """Register fasttfm for torch.nn.attention.activate_flash_attention_impl(). Raises UserError if torch is too old."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise UserError(
            f"torch {torch.__version__} has no register_flash_attention_impl: upgrade it, or use replace_modules()"
        )
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)


def activate(key: str = "CUDA") -> Any:
    """Override torch's forward and backward operators for a dispatch key, until torch calls the result's remove()."""
    library = torch.library.Library("aten", "IMPL", key)
    library.impl("_scaled_dot_product_flash_attention", forward, key)
    library.impl("_scaled_dot_product_flash_attention_backward", backward, key)
    return SimpleNamespace(remove=library._destroy)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> _Forward:
    """aten's _scaled_dot_product_flash_attention on query (B, H, L, D), key and value (B, Hk, S, D).

    Returns the output, like query, its log-sum-exp (B, H, L) float32, two None, L, S, the dropout seed (2,) uint64, an
    unused offset, and an empty mask. Raises ValueError for unsupported arguments.
    """
    if return_debug_mask:
        raise ValueError("return_debug_mask is True: the kernels return no mask, leave it False")
    check_heads(query, key, None, None)
    check_value(query, key, value)
    options = _options(query, dropout_p, is_causal, scale, None)
    buffers = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    from fasttfm.kernels.attention import once

    kernel = _kernel(query, key, value, options)
    output, lse = once.forward(kernel, query, key, value, out=buffers, **options._asdict())
    seed = query.new_zeros(2, dtype=torch.int64)
    if options.seed is not None:
        seed[:1] = options.seed
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    sizes, mask = (query.shape[2], key.shape[2]), query.new_empty(0)
    return output, lse / _LOG2E, None, None, *sizes, seed.view(torch.uint64), offset, mask


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten's backward operator: gradients of query, key and value, from the outputs of forward()."""
    options = _options(query, dropout_p, is_causal, scale, philox_seed.view(torch.int64)[:1])
    from fasttfm.kernels.attention import once

    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    tensors = grad_out, query, key, value, out, logsumexp * _LOG2E
    once.backward(_kernel(query, key, value, options), *tensors, out=gradients, **options._asdict())
    return gradients


def _options(query: Tensor, dropout_p: float, causal: bool, scale: float | None, seed: Tensor | None) -> Options:
    seed = seed if dropout_p else None
    return options_of(query, (*query.shape[:3], 0), causal=causal, dropout_p=dropout_p, scale=scale, seed=seed)


def _kernel(query: Tensor, key: Tensor, value: Tensor, options: Options) -> str:
    """The fused kernel for these tensors. Raises ValueError if there is none."""
    backend = backend_of("triton", query, value, key.shape[2], options)
    if backend == "softmax":
        backend = "flash"
    if backend not in KERNELS:
        raise ValueError(f"query is {query.dtype} on {query.device}: no kernel takes it")
    return backend
