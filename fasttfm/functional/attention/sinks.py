"""Attention with sinks by torch's fused CPU kernel, which knows none, and its gradients.

A sink of score z beside keys of log-sum-exp e takes the share 1 - sigmoid(e - z) of a row's weight, and has no value:
the output is the kernel's times sigmoid(e - z). With log(exp(e) + exp(z)) in place of e, and that output, the kernel's
backward pass gives the gradients of query, key and value.
"""

from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.attention import torch_route
from fasttfm.functional.attention.arguments import LARGEST, Options


def attention(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """The output (B, H, L, D) of float32 where routes.takes_fused() says so."""
    mask = torch_route.fused_mask(query, key, options)
    query, key, value = torch_route.with_unit_strides(query, key, value)
    return _Attention.apply(query, key, value, options.sinks, mask["attn_mask"], mask["is_causal"], options.scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool,
        scale: float,
    ) -> Tensor:  # fmt: skip
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = attend(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        sunk = _bounded(sinks)
        output = output * torch.sigmoid(lse.clamp(min=-LARGEST) - sunk)[..., None]
        ctx.save_for_backward(query, key, value, sinks, mask, output, torch.logaddexp(lse, sunk))
        ctx.causal, ctx.scale = causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_Gradients.apply(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None


class _Gradients(torch.autograd.Function):
    """Gradients of query, key, value and sinks, whose own are refused: of what they compute they would be wrong."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None,
        output: Tensor, lse: Tensor, causal: bool, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = differentiate(grad, query, key, value, output, lse, 0.0, causal, attn_mask=mask, scale=scale)
        weight = (_bounded(sinks) - lse.clamp(min=-LARGEST)).exp()
        d_sinks = -(weight * (grad * output).sum(-1)).sum((0, 2))
        return *gradients, d_sinks.to(sinks.dtype)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(
            "attention with sinks beside long rows: second derivatives are not implemented; use fasttfm.reference for "
            "them"
        )


def _bounded(sinks: Tensor) -> Tensor:
    """Sinks (H, 1) float32; inf must not be subtracted from itself."""
    return sinks.float().clamp(max=LARGEST)[:, None]
