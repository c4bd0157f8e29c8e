"""The ways attention is computed, and which of them a call takes.

    short, flash    one Triton kernel, for rows of few keys or of any number: kernels/attention
    softmax         one Triton kernel between two products of cuBLAS: softmax_route.py
    explicit        products and softmax of PyTorch: torch_route.py
    blocks          our own loop on a CPU, for float32 and everything that changes scores: cpu/attention_pass.py
    fused           PyTorch's own kernel on a CPU, for float32 and for batch-invariant searches: torch_route.py

A call is decided once, before it computes, and its backward pass takes the same way.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasttfm.cpu import attention_pass
from fasttfm.cpu.linear import batch_invariant
from fasttfm.functional import backends
from fasttfm.functional.attention import softmax_route, torch_route
from fasttfm.functional.attention.arguments import Options
from fasttfm.functional.attention.layout import empty_heads_last
from fasttfm.functional.backends import BACKENDS, kernels_take
from fasttfm.functional.operator import Size, casts, transformed
from fasttfm.functional.subclasses import PLAIN_TENSORS

FUSED_QUERIES = FUSED_KEYS = 16
"""From so many on torch's fused CPU kernel is the faster in float32, and keeps no weights. Few queries over many keys
are a search's (step.py); in bfloat16 its softmax and backward pass are slow. On two cores of an AMD EPYC with AVX-512
forward and backward took 1.3 and 1.1 times less at 100 keys, 4.3 and 2.2 times at 1,024 under a triangle; below 64 keys
forward is hardly faster, and backward takes half as long (`python -m benchmarks kernels`). A search's last bits depend
on it."""


SAVING_WEIGHTS = ("explicit", "softmax")


def decide(asked: str, query: Tensor, value: Tensor, keys: Size, options: Options | None = None) -> str:
    """short, flash, softmax, explicit or, for batch-invariant searches on a CPU, fused.

    asked: auto, triton or torch, or this function's own answer, which stays. query (..., D), value (..., Dv); keys of
    the longest row; options where they may have a window. The kernels' tables decide where a kernel takes the tensors:
    by chip, dtype (float32 by whether torch allows TF32 now), head size and keys.
    """
    if asked not in BACKENDS:
        return asked
    device, dtype = query.device, query.dtype
    if asked == "torch" or not kernels_take(asked, device, dtype):
        # torch's own kernel takes one sequence after the other, PyTorch's products all of them at once
        return "fused" if batch_invariant(query) and query.shape[-1] == value.shape[-1] else "explicit"
    from fasttfm.kernels.attention import launch as attention_launch
    from fasttfm.kernels.launch import chip, product_kind

    device_chip = chip(device)
    width = attention_launch.width_class(max(query.shape[-1], value.shape[-1]))
    kind = product_kind(dtype, device_chip)
    route = attention_launch.route(device_chip, kind, width, attention_launch.key_class(keys))
    if route == "softmax" and options is not None and _is_narrow(options, keys):
        return "flash" if attention_launch.takes_long(device_chip, kind, width) else route
    return route


def _is_narrow(options: Options, keys: Size) -> bool:
    """Return whether a window leaves no more than a quarter of the keys. A kernel for long rows multiplies these alone,
    at three to five times the cycles of a score: on paper, beside cuBLAS' products and the scores' way through the
    memory, by the machine code for sm_60 to sm_75."""
    return options.causal and options.window != -1 and 4 * (options.window + 1) <= keys


def kernels_score(asked: str, query: Tensor) -> bool:
    """Return whether kernels take options that are not plain; else PyTorch computes and differentiates them."""
    dtype = torch.get_autocast_dtype(query.device.type) if casts(query) else query.dtype
    return not transformed() and forward_ad._current_level < 0 and kernels_take(asked, query.device, dtype)


def asked(query: Tensor, key: Tensor, value: Tensor, options: Options, choice: str | None = None) -> str:
    """Return what decide() is asked of heads (B, H, ., D): blocks where our own loop on a CPU is the faster way,
    gradients too; else choice, or what is backends.current."""
    takes = (
        query.is_cpu
        and not torch.compiler.is_compiling()
        and backends.current != "triton"
        and not casts(query)
        and not (transformed() or forward_ad._current_level >= 0)
        and attention_pass.takes(query, key, value, options)
    )
    return "blocks" if takes else choice or backends.current


def takes_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float = 1.0, seed: Tensor | None = None
) -> bool:
    """Return whether attention() is torch's own kernel, gradients too: where that is the faster way on a CPU."""
    return (
        query.is_cpu
        and seed is None
        and PLAIN_TENSORS.issuperset(map(type, (query, key, value)))
        and query.dtype == key.dtype == value.dtype == torch.float32
        and backends.current != "triton"
        and not casts(query)
        and not (transformed() or forward_ad._current_level >= 0)  # of which torch's kernel knows little
        and scale > 0.0  # its masks are -inf times the scale
        and value.shape[3] == query.shape[3]
        and _long(query, key)
        and not (mask is not None and mask.requires_grad)
    )


def _long(query: Tensor, key: Tensor) -> bool:
    """Tell if torch's kernel is the faster way at these lengths. Where a graph leaves a length open, nothing may depend
    on it: the graph would hold for the lengths of its example alone."""
    conditions = (query.shape[2] >= FUSED_QUERIES, key.shape[2] >= FUSED_KEYS, query.shape[0] > 0, query.shape[1] > 0)
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return all(statically_known_true(condition) for condition in conditions)
    return all(conditions)


def takes_kernel(asked: str, scores: Tensor) -> str:
    """The route of attention_weights(): softmax or explicit; asked as decide() takes it."""
    if asked not in BACKENDS:
        return asked
    return "softmax" if kernels_take(asked, scores.device, scores.dtype) else "explicit"


def saves_weights(route: str) -> bool:
    """Return whether the forward pass keeps the weights (B, H, L, S) rather than their log-sum-exp (B, H, L)."""
    return route in SAVING_WEIGHTS


def flops(pairs: int, width: int, value_width: int, backward: str | None = None) -> int:
    """Operations of the products of attention on so many pairs of a query and a key, those of all heads counted, hidden
    ones too; or of its backward pass by a route, which may compute the scores once more."""
    if backward is None:
        return 2 * pairs * (width + value_width)
    return 2 * pairs * ((2 if saves_weights(backward) else 3) * width + 2 * value_width)


def writes_where_told(route: str) -> bool:
    """Return whether forward() takes memory to write to."""
    return route in ("short", "flash", "blocks")


def forward(
    route: str, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """By explicit, softmax or fused, the output (B, H, L, Dv), heads last in memory; the weights before dropout or the
    log-sum-exp, as saves_weights() says; and from explicit the weights after dropout, if any is dropped, from softmax
    the log-sum-exp, if there are sinks, from fused what is added to the scores, if anything is."""
    way = {"explicit": torch_route.forward, "fused": torch_route.fused_forward, "softmax": softmax_route.forward}[route]
    return way(query, key, value, options)


def fake(route: str, query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    """Return empty outputs of forward()'s shapes."""
    output = empty_heads_last(query, value.shape[-1])
    if route == "fused" and (addend := torch_route.fused_addend(query, key, options)) is not None:
        return output, query.new_empty(query.shape[:3], dtype=torch.float32), torch.empty_like(addend)
    return output, *fake_saved(route, query, (*query.shape[:3], key.shape[2]), options)


def fake_saved(route: str, like: Tensor, shape: tuple, options: Options) -> tuple[Tensor, Tensor | None]:
    """Return empty tensors in the shape of what is saved of weights of this shape."""
    lse = like.new_empty(shape[:3], dtype=torch.float32)
    if not saves_weights(route):
        return lse, None
    weights = like.new_empty(shape)
    if route == "softmax" and options.sinks is not None:
        return weights, lse
    return weights, torch.empty_like(weights) if route == "explicit" and options.seed is not None else None


def backward(
    route: str,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor | None,
    saved: Tensor,
    kept: Tensor | None,
    options: Options,
    *,
    mask_gradient: bool = False,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key and value and, if asked for, of the additive mask; saved and kept as forward() gave them.

    out: memory for the first three, of planes() that are views; not for fused.
    """
    tensors = (grad, query, key, value)
    if route == "explicit":
        dropped = kept if options.seed is not None else None
        return torch_route.backward(*tensors, saved, dropped, options, mask_gradient, out)
    if route == "softmax":
        return softmax_route.backward(*tensors, saved, options, mask_gradient, out)
    assert output is not None
    return torch_route.fused_backward(*tensors, output, saved, kept, options)
