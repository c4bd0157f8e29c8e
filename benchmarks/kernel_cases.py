"""What each kernel is timed on, and what against: torch eager, torch.compile, SDPA's backends, a plain copy.

A provider is a function without arguments that does the whole piece of work once, forward or forward and backward.
Shapes are those of training: about 25,000 tokens a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as nnF
from fasttfm.kernels import costs
from fasttfm.kernels.costs import Cost
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fasttfm import functional as F

Provider = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of work on one shape."""

    name: str
    shape: dict[str, Any]
    dtype: torch.dtype
    backward: bool
    """Whether a run is forward and backward, or forward alone."""
    cost: Cost
    """What the whole run must cost."""
    providers: dict[str, Provider] = field(repr=False)

    def record(self) -> dict[str, Any]:
        """The case as JSON can hold it."""
        return {
            "benchmark": self.name,
            **self.shape,
            "dtype": str(self.dtype).removeprefix("torch."),
            "pass": "forward+backward" if self.backward else "forward",
        }


def _provider(function: Callable[..., Any], inputs: tuple[Tensor, ...], backward: bool) -> Provider:
    """Runs function(*inputs), and its gradient with respect to the inputs that ask for one."""
    wanted = [x for x in inputs if x.requires_grad]
    ones: list[Tensor] = []

    def run() -> Any:
        if not backward:
            with torch.no_grad():
                return function(*inputs)
        outputs = function(*inputs)
        outputs = [outputs] if isinstance(outputs, Tensor) else [o for o in outputs if o.requires_grad]
        if not ones:
            ones.extend(torch.ones_like(o) for o in outputs)
        return torch.autograd.grad(outputs, wanted, ones)

    return run


def _providers(
    functions: dict[str, Callable[..., Any]], inputs: tuple[Tensor, ...], backward: bool
) -> dict[str, Provider]:
    with_compile = {**functions, "compile": _compiled(functions["eager"])}
    return {name: _provider(function, inputs, backward) for name, function in with_compile.items()}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    made: list[Callable[..., Any]] = []

    def run(*inputs: Tensor) -> Any:
        if not made:  # not before it is wanted: torch.compile takes seconds to import
            made.append(torch.compile(function, dynamic=False))  # the best that it can do for one shape
        return made[0](*inputs)

    return run


def attention(
    batch: int,
    heads: int,
    length: int,
    head_size: int,
    *,
    padded: bool,
    causal: bool,
    dropout_p: float,
    backward: bool,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> Case:
    """Self-attention; padded: lengths between half and all of `length`, which SDPA is told as a mask."""
    # one projection's output, seen as three (B, H, L, D): the strides that a model has
    joint = torch.randn(batch, length, 3, heads, head_size, dtype=dtype, device=device)
    query, key, value = (x.detach().requires_grad_() for x in joint.permute(2, 0, 3, 1, 4))
    lengths = torch.linspace(length / 2, length, batch, device=device).ceil().long() if padded else None
    mask = None if lengths is None else (torch.arange(length, device=device) < lengths[:, None])[:, None, None, :]
    if mask is not None and causal:
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=device).tril()
    alone = causal and mask is None

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.attention(q, k, v, key_lengths=lengths, causal=causal, dropout_p=dropout_p)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * head_size**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif causal:
            scores = scores + torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1)
        return nnF.dropout(torch.softmax(scores, dim=-1), dropout_p) @ v

    def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return nnF.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=alone)

        return run

    functions = {
        "fasttfm": ours,
        "eager": eager,
        "sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa-efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa-math": sdpa(SDPBackend.MATH),
    }
    sizes = (batch, heads, length, length, head_size, dtype.itemsize)
    cost = costs.attention(*sizes, causal=causal, dropout=dropout_p > 0)
    if backward:
        back = costs.attention_backward_short if length <= 128 else costs.attention_backward_long
        cost += back(*sizes, causal=causal, dropout=dropout_p > 0)
    shape: dict[str, Any] = {"B": batch, "H": heads, "L": length, "D": head_size}
    shape |= {"padded": padded, "causal": causal, "dropout": dropout_p}
    return Case("attention", shape, dtype, backward, cost, _providers(functions, (query, key, value), backward))


def residual_layer_norm(
    rows: int,
    width: int,
    *,
    dropout_p: float,
    backward: bool,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> Case:
    """Post-norm; with a plain copy of as many bytes beside it, the bandwidth that there is."""
    x, residual = (torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(width, device=device, requires_grad=True) for _ in range(2))

    def ours(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.residual_layer_norm(x, residual, weight, bias, dropout_p=dropout_p)[0]

    def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        s = residual + nnF.dropout(x, dropout_p)
        return nnF.layer_norm(s, (width,), weight.to(dtype), bias.to(dtype))

    cost = costs.residual_layer_norm(rows, width, dtype.itemsize, dropout=dropout_p > 0)
    if backward:
        cost += costs.residual_layer_norm_backward(rows, width, dtype.itemsize, stream=False, dropout=dropout_p > 0)
    source = torch.empty(cost.bytes // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    providers = _providers({"fasttfm": ours, "eager": eager}, (x, residual, weight, bias), backward)
    providers["copy"] = lambda: target.copy_(source)
    shape: dict[str, Any] = {"M": rows, "N": width, "dropout": dropout_p}
    return Case("residual_layer_norm", shape, dtype, backward, cost, providers)


def feed_forward(
    rows: int,
    width: int,
    hidden: int,
    *,
    dropout_p: float,
    backward: bool,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> Case:
    """Both products with what lies between them."""

    def parameter(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(dtype).requires_grad_()

    inputs = (
        torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True),
        parameter(hidden, width),
        parameter(hidden),
        parameter(width, hidden),
        parameter(width),
    )

    def ours(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.feed_forward(x, w1, b1, w2, b2, dropout_p=dropout_p)

    def eager(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return nnF.linear(nnF.dropout(torch.relu(nnF.linear(x, w1, b1)), dropout_p), w2, b2)

    size = dtype.itemsize
    cost = costs.linear(rows, width, hidden, size) + costs.linear(rows, hidden, width, size)
    if backward:
        cost += costs.linear_backward(rows, width, hidden, size, bias=False)
        cost += costs.linear_backward(rows, hidden, width, size, bias=True)
    shape: dict[str, Any] = {"M": rows, "N": width, "F": hidden, "dropout": dropout_p}
    return Case(
        "feed_forward", shape, dtype, backward, cost, _providers({"fasttfm": ours, "eager": eager}, inputs, backward)
    )


def linear_cross_entropy(
    rows: int,
    width: int,
    vocabulary: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> Case:
    """Logits, label-smoothed loss and both gradients."""
    hidden = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=device) * width**-0.5).to(dtype).requires_grad_()
    target = torch.randint(vocabulary, (rows,), device=device)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1)[0]

    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = (hidden @ weight.T).float()  # as under autocast
        return nnF.cross_entropy(logits, target, label_smoothing=0.1, reduction="sum")

    size = dtype.itemsize
    cost = costs.linear(rows, width, vocabulary, size) + costs.cross_entropy(rows, vocabulary, size)
    cost += costs.linear_backward(rows, width, vocabulary, size, bias=False)
    shape = {"M": rows, "N": width, "V": vocabulary}
    functions = {"fasttfm": ours, "eager": eager}
    return Case("linear_cross_entropy", shape, dtype, True, cost, _providers(functions, (hidden, weight), True))


def embedding(
    batch: int,
    length: int,
    width: int,
    vocabulary: int,
    *,
    backward: bool,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
) -> Case:
    """Scale, position and dropout in the gather; the table stays in its own dtype."""
    weight = torch.randn(vocabulary, width, dtype=dtype, device=device, requires_grad=True)
    positions = torch.randn(length, width, device=device)
    tokens = torch.randint(1, vocabulary, (batch, length), device=device)

    def ours(weight: Tensor) -> Tensor:
        return F.embed(tokens, weight, positions, scale=width**0.5, pad_id=0, dropout_p=0.1)

    def eager(weight: Tensor) -> Tensor:
        return nnF.dropout(nnF.embedding(tokens, weight, padding_idx=0) * width**0.5 + positions, 0.1)

    cost = costs.embedding(batch * length, width, dtype.itemsize, dropout=True)
    if backward:
        cost += costs.embedding_backward(batch * length, width, vocabulary, dtype.itemsize, dropout=True)
    shape: dict[str, Any] = {"B": batch, "L": length, "N": width, "V": vocabulary, "dropout": 0.1}
    functions = {"fasttfm": ours, "eager": eager}
    return Case("embedding", shape, dtype, backward, cost, _providers(functions, (weight,), backward))


def all_cases() -> list[tuple[str, Callable[[], Case]]]:
    """The benchmarks of one check, by name; each is made when called, because together they would not fit in memory."""
    found: list[Callable[[], Case]] = []
    for backward in (False, True):
        for length in (27, 100):
            short = partial(attention, 25_000 // length, 8, length, 64, padded=True, dropout_p=0.1, backward=backward)
            found += [partial(short, causal=False), partial(short, causal=True)]
        for length in (1024, 2048, 4096):
            long = partial(attention, 16_384 // length, 16, length, 64, padded=False, dropout_p=0.0, backward=backward)
            found.append(partial(long, causal=True))
        for width in (512, 1024):
            found.append(partial(residual_layer_norm, 25_000, width, dropout_p=0.1, backward=backward))
            found.append(partial(feed_forward, 25_000, width, 4 * width, dropout_p=0.0, backward=backward))
        found.append(partial(feed_forward, 25_000, 512, 2048, dropout_p=0.1, backward=backward))
        found.append(partial(embedding, 250, 100, 512, 37_000, backward=backward))
    found += [partial(linear_cross_entropy, 25_000, width, 37_000) for width in (512, 1024)]
    return [(make.func.__name__, make) for make in found]  # type: ignore[attr-defined]
