"""The position-wise feed-forward network (Vaswani et al. 2017, equation 2), bias, ReLU and dropout fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional import _dropped, _layers
from fasttfm.functional._backend import chosen
from fasttfm.functional._operators import Operator, lower_precision


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    bias1_parts: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """dropout(max(0, x W1^T + b1)) W2^T + b2 (equation 2; dropout on the hidden activation as in tensor2tensor).

    x (..., N); weight1 (F, N), bias1 (F,), weight2 (N', F), bias2 (N',), laid out as torch.nn.Linear's, all of one
    floating dtype (autocast casts them to its own); a bias may be None. bias1_parts (feed_forward_programs(), F)
    float32 takes the gradient of bias1 in its stead, as parts that read_parameters() adds up. dropout_p in [0, 1],
    rounded to 1/65536; seed (1,) int64 on x's device, drawn from torch's generator when None; stream tells the dropouts
    of one model apart. Returns (..., N'). Keeps x and the hidden activation for the backward pass, once: M * (N + F)
    elements (plus M * F / 8 bytes of mask where a Triton kernel wrote it), against M * (N + 2 F) elements and M * F
    bytes of torch.nn.
    Raises ValueError for shapes or dtypes that do not agree or a dropout_p outside [0, 1].
    """
    _check(x, weight1, bias1, weight2, bias2)
    seed = _dropped.seed_for(x, dropout_p, seed)
    return _feed_forward(x, weight1, bias1, weight2, bias2, bias1_parts, dropout_p, seed, stream, chosen())[0]


def feed_forward_programs(rows: int, hidden: int, out: int, dtype: torch.dtype, device: torch.device) -> int:
    """Into how many parts the kernels sum the gradient of bias1 for x (rows, N), weight1 (hidden, N), weight2 (out, .),
    products in dtype."""
    from fasttfm.kernels import feed_forward as kernel

    return kernel.sum_programs(rows, hidden, out, dtype, device, _route(chosen()))


def _check(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None) -> None:
    if weight1.dim() != 2 or weight2.dim() != 2 or x.dim() == 0:
        raise ValueError(
            f"feed_forward takes x (..., N), weight1 (F, N) and weight2 (N', F): got {tuple(x.shape)}, "
            f"{tuple(weight1.shape)} and {tuple(weight2.shape)}"
        )
    for name, given, wanted in (
        ("x's last dimension", x.shape[-1:], weight1.shape[1:]),
        ("weight2's last dimension", weight2.shape[1:], weight1.shape[:1]),
        ("bias1", weight1.shape[:1] if bias1 is None else bias1.shape, weight1.shape[:1]),
        ("bias2", weight2.shape[:1] if bias2 is None else bias2.shape, weight2.shape[:1]),
    ):
        if given != wanted:
            raise ValueError(
                f"feed_forward: {name} is {tuple(given)} but must be {tuple(wanted)} for weight1 "
                f"{tuple(weight1.shape)} and weight2 {tuple(weight2.shape)}"
            )


def _one_dtype(x: Tensor, *others: Tensor | None) -> None:
    if any(t is not None and t.dtype != x.dtype for t in others):
        raise ValueError(
            "feed_forward takes tensors of one dtype: got x "
            + ", ".join([str(x.dtype), *(str(t.dtype) for t in others if t is not None)])
            + " (x, weights, biases); cast them, or run under torch.autocast"
        )


def _route(backend: str) -> str | None:
    """fused when Triton was asked for by name; None leaves the choice to the table."""
    return "fused" if backend == "triton" else None


def _scale(dropout_p: float, seed: Tensor | None) -> float:
    """What kept values are multiplied by."""
    return reference.dropout_scale(dropout_p) if _dropped.active(dropout_p, seed) else 1.0


def _scaled_mm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a b, the scale inside the product."""
    return torch.mm(a, b) if scale == 1.0 else torch.addmm(a.new_empty(1, 1), a, b, beta=0, alpha=scale)


def _scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """scale * x weight^T + bias."""
    if scale == 1.0:
        return torch.nn.functional.linear(x, weight, bias)
    if bias is None:
        return _scaled_mm(x, weight.t(), scale)
    return torch.addmm(bias, x, weight.t(), alpha=scale)


def _forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    bias1_parts: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (..., N'), the hidden activation (M, F), zero where dropped but not yet scaled, and the mask's bits.

    The scale of dropout rides in the product: exact, and no pass of its own. The bits (M, ceil(F / 32)) int32 are empty
    where no kernel wrote them: hidden > 0 says the same.
    """
    _one_dtype(x, weight1, bias1, weight2, bias2)
    rows = _layers.rows(x)
    if _layers.by_kernel(backend, x):
        from fasttfm.kernels import feed_forward as kernel

        out, hidden, bits = kernel.feed_forward(
            rows, weight1, bias1, weight2, bias2,
            dropout_p=dropout_p, seed=seed, stream=stream, route=_route(backend),
        )  # fmt: skip
        return _shaped(out, x), hidden, bits
    hidden = torch.nn.functional.linear(rows, weight1, bias1).relu_()
    keep = _dropped.kept(hidden, dropout_p, seed, stream)
    if keep.numel():
        hidden *= _dropped.as_factor(keep, hidden.dtype)
    out = _scaled_linear(hidden, weight2, bias2, _scale(dropout_p, seed))
    return _shaped(out, x), hidden, x.new_empty(0, dtype=torch.int32)


def _shaped(out: Tensor, x: Tensor) -> Tensor:
    """out (M, N') with the leading dimensions of x (..., N)."""
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def _forward_fake(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    bias1_parts: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    stream: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, hidden = x.numel() // x.shape[-1], weight1.shape[0]
    bits = x.new_empty((rows, (hidden + 31) // 32) if _writes_bits(x, seed, backend) else (0,), dtype=torch.int32)
    return x.new_empty(*x.shape[:-1], weight2.shape[0]), x.new_empty(rows, hidden), bits


def _writes_bits(x: Tensor, seed: Tensor | None, backend: str) -> bool:
    if not _layers.by_kernel(backend, x):
        return False
    from fasttfm.kernels import feed_forward as kernel

    return (_route(backend) or kernel.forward_route(x, seed is not None)) == "fused"


def _backward(
    dout: Tensor,
    x: Tensor,
    hidden: Tensor,
    bits: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    has_bias1: bool,
    has_bias2: bool,
    in_parts: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dweight1, dbias1, dweight2, dbias2; a bias gradient that nobody wants is empty.

    in_parts: of how many parts dbias1 is the sum, where these are wanted in its stead, (in_parts, F) float32; else 0.
    """
    dout, rows = _layers.rows(dout), _layers.rows(x)
    if _layers.by_kernel(backend, x):
        from fasttfm.kernels import feed_forward as kernel

        dx, *others = kernel.feed_forward_backward(
            dout, rows, hidden, bits, weight1, weight2,
            bias1=has_bias1, bias2=has_bias2, scale=scale, route=_route(backend), in_parts=in_parts > 0,
        )  # fmt: skip
        return _layers.shaped(dx, x), *others
    # hidden > 0 exactly where the ReLU was open and dropout kept: one comparison undoes both
    dhidden = _scaled_mm(dout, weight2, scale)
    dhidden = torch.ops.aten.threshold_backward(dhidden, hidden, 0)
    none = x.new_empty(0)
    dbias1 = dhidden.sum(0) if has_bias1 else none
    if in_parts:
        dbias1 = torch.nn.functional.pad(dbias1[None].float(), (0, 0, 0, in_parts - 1))
    return (
        _layers.shaped(torch.mm(dhidden, weight1), x),
        torch.mm(dhidden.t(), rows),
        dbias1,
        _scaled_mm(dout.t(), hidden, scale),
        dout.sum(0) if has_bias2 else none,
    )


def _backward_fake(
    dout: Tensor,
    x: Tensor,
    hidden: Tensor,
    bits: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    has_bias1: bool,
    has_bias2: bool,
    in_parts: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        weight1.new_empty(weight1.shape),
        weight1.new_empty(in_parts, weight1.shape[0], dtype=torch.float32)
        if in_parts
        else weight1.new_empty(weight1.shape[0] if has_bias1 else 0),
        weight2.new_empty(weight2.shape),
        weight2.new_empty(weight2.shape[0] if has_bias2 else 0),
    )


def _save(ctx: Any, args: tuple, outputs: tuple[Tensor, ...]) -> None:
    x, weight1, bias1, weight2, bias2, parts, dropout_p, seed, _, backend = args
    _, hidden, bits = outputs
    ctx.mark_non_differentiable(hidden, bits)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, hidden, bits, weight1, weight2)
    in_parts = 0 if parts is None else parts.shape[0]
    ctx.options = (bias1 is not None, bias2 is not None, in_parts, _scale(dropout_p, seed), backend)


def _autograd(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 10
    dx, dweight1, dbias1, dweight2, dbias2 = _feed_forward_backward(dout, *ctx.saved_tensors, *ctx.options)
    has_bias1, has_bias2, in_parts, *_ = ctx.options
    dbias1, parts = (None, dbias1) if in_parts else (dbias1 if has_bias1 else None, None)
    return dx, dweight1, dbias1, dweight2, dbias2 if has_bias2 else None, parts, None, None, None, None


_feed_forward_backward = Operator(
    "feed_forward_backward(Tensor dout, Tensor x, Tensor hidden, Tensor bits, Tensor weight1, Tensor weight2,"
    " bool has_bias1, bool has_bias2, int in_parts, float scale, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_feed_forward = Operator(
    "feed_forward(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2,"
    " Tensor? bias1_parts, float dropout_p, Tensor? seed, int stream, str backend) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    save=_save,
    backward=_autograd,
    autocast=lambda args, dtype: (*lower_precision(args[:5], dtype), *args[5:]),
)
