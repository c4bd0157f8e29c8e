"""Small problems for every operator: inputs, our function and the reference's."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fasttfm import functional as F
from fasttfm import reference


@dataclass(frozen=True)
class Problem:
    """One operator on one set of inputs."""

    name: str
    inputs: Callable[[torch.device, torch.dtype], dict[str, Tensor]]
    """Tensors by name; floating-point ones take a gradient."""
    ours: Callable[..., Any]
    """(seed, **inputs) -> output or outputs."""
    theirs: Callable[..., Any]
    """The same in plain PyTorch, in the precision of the inputs."""
    dropout: bool = False
    keys: int = 0
    """Attention: length of the longest row; 0 for other operators and for attention weights."""
    width: int = 0
    """Attention: the larger head size."""
    extras: int = 0
    """Attention: 1 with dropout, 2 with a mask, 3 with a window, soft cap or slopes, 4 with shared keys."""

    def __str__(self) -> str:
        return self.name


def solve(way: Callable[..., Any], inputs: dict[str, Tensor]) -> list[Tensor]:
    """Outputs of a problem's ours or theirs, then the gradients of all floating-point inputs."""
    inputs = {k: v.detach().requires_grad_(v.is_floating_point()) for k, v in inputs.items()}
    device = next(iter(inputs.values())).device
    outputs = way(torch.tensor([987654321], device=device), **inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator(device).manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator, device=device) for o in outputs]
    total = sum((o.double() * w).sum() for o, w in zip(outputs, weights, strict=True))
    leaf_tensors = [v for v in inputs.values() if v.requires_grad]
    gradients = torch.autograd.grad(total, leaf_tensors, allow_unused=True)
    return [*outputs, *(g for g in gradients if g is not None)]


def in_double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def _random(*shape: int, scale: float = 1.0) -> Callable[[torch.device, torch.dtype], Tensor]:
    return lambda device, dtype: (torch.randn(shape, device=device) * scale).to(dtype)


def _attention(B: int, H: int, L: int, S: int, D: int, Dv: int, *, p: float = 0.0, **options: Any) -> Problem:
    lengths, masked = options.pop("lengths", None), options.pop("mask", None)
    key_heads = options.pop("key_heads", H)
    slopes, sinks = options.pop("slopes", False), options.pop("sinks", False)

    def scoring(device: torch.device) -> dict[str, Any]:
        return {**options, "alibi_slopes": torch.arange(1, H + 1, device=device) / 8} if slopes else options

    def inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        made = {
            "query": _random(B, L, H, D)(device, dtype).transpose(1, 2),  # strided like the output of a projection
            "key": _random(B, key_heads, S, D)(device, dtype),
            "value": _random(B, key_heads, S, Dv)(device, dtype),
        }
        if lengths is not None:
            made["key_lengths"] = torch.tensor(lengths, device=device)
        if masked == "bool":
            made["mask"] = torch.rand(B, 1, L, S, device=device) < 0.7
        if masked == "add":  # takes a gradient
            made["mask"] = torch.randn(H, L, S, device=device).to(dtype)
        if sinks:  # take a gradient
            made["sinks"] = torch.randn(H, device=device).to(dtype)
        return made

    def ours(seed: Tensor, **x: Tensor) -> Tensor:
        return F.attention(**x, dropout_p=p, seed=seed, site=3, **scoring(seed.device))

    def theirs(seed: Tensor, **x: Tensor) -> Tensor:
        return reference.attention(**x, dropout_p=p, seed=seed, site=3, **scoring(seed.device))[0]

    words = [f"attention {L}x{S} D{D}/{Dv}", *options, *(["lengths"] if lengths else []), *(["dropout"] if p else [])]
    words += [f"{masked} mask"] if masked else []
    words += ["slopes"] * slopes + ["sinks"] * sinks
    words += [f"{H // key_heads} heads a key"] if key_heads != H else []
    scored = slopes or "window" in options or "softcap" in options
    extras = 3 if scored else 2 if masked else 4 if key_heads != H else int(p > 0)
    return Problem(" ".join(words), inputs, ours, theirs, p > 0, keys=S, width=max(D, Dv), extras=extras)


def _packed_qkv(B: int, L: int, S: int | None, H: int, D: int, *, causal: bool) -> Problem:
    """Attention on packed projections; S: number of keys in cross-attention."""
    options: dict[str, Any] = {"causal": causal, "dropout_p": 0.1, "site": 6}

    def theirs(seed: Tensor, packed_qkv: Tensor, query: Tensor | None = None) -> Tensor:
        query, key, value = packed_qkv.unbind(2) if query is None else (query, *packed_qkv.unbind(2))
        heads = (x.transpose(1, 2) for x in (query, key, value))
        return reference.attention(*heads, seed=seed, **options)[0].transpose(1, 2).flatten(2)

    shapes = {"packed_qkv": (B, L, 3, H, D)} if S is None else {"packed_qkv": (B, S, 2, H, D), "query": (B, L, H, D)}
    name = f"packed_qkv_attention {L}x{S or L}" + (" causal" if causal else "")
    alone = _simple(
        name, shapes, lambda seed, **t: F.packed_qkv_attention(**t, seed=seed, **options), theirs, dropout=True
    )
    return replace(alone, keys=S or L, width=D, extras=1)


def _weights(B: int, H: int, L: int, S: int, D: int) -> Problem:
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.1, "site": 2}

    def theirs(seed: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # with unit vectors as values, the output equals the weights
        unit = torch.eye(S, dtype=query.dtype, device=query.device).expand(B, H, S, S)
        return reference.attention(query, key, unit, seed=seed, **options)[0]

    return _simple(
        f"attention_weights {L}x{S}",
        {"query": (B, H, L, D), "key": (B, H, S, D)},
        lambda seed, query, key: F.attention_weights(query, key, seed=seed, **options),
        theirs,
        dropout=True,
    )


def _rotary(B: int, H: int, L: int, D: int, R: int, *, interleaved: bool) -> Problem:
    angles = torch.arange(2 * L)[:, None] / torch.arange(1, R // 2 + 1)

    def way(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(seed: Tensor, x: Tensor, positions: Tensor) -> Tensor:
            return function(x, angles.cos().to(x.device), angles.sin().to(x.device), positions, interleaved=interleaved)

        return call

    def positions(device: torch.device) -> Tensor:
        return (torch.arange(B * L, device=device) * 7 % (2 * L)).view(B, L)

    name = f"rotary {L}xD{D}/{R}" + (" interleaved" if interleaved else "")
    return _simple(name, {"x": (B, H, L, D)}, way(F.rotary), way(reference.rotary), positions=positions)


def _packed(cu_seqlens_q: list[int], cu_seqlens_k: list[int], H: int, D: int, *, causal: bool) -> Problem:
    options: dict[str, Any] = {"causal": causal, "dropout_p": 0.1, "site": 4}
    longest = [max(b - a for a, b in itertools.pairwise(s)) for s in (cu_seqlens_q, cu_seqlens_k)]

    def starts(places: list[int]) -> Callable[[torch.device], Tensor]:
        return lambda device: torch.tensor(places, dtype=torch.int32, device=device)

    queries, keys = cu_seqlens_q[-1] + 3, cu_seqlens_k[-1]  # three rows of filler
    packed = _simple(
        f"varlen_attention {longest[0]}x{longest[1]}" + (" causal" if causal else ""),
        {"query": (queries, H, D), "key": (keys, H, D), "value": (keys, H, D)},
        lambda seed, **t: F.varlen_attention(
            **t, max_seqlen_q=longest[0], max_seqlen_k=longest[1], seed=seed, **options
        ),
        lambda seed, **t: reference.varlen_attention(**t, seed=seed, **options),
        dropout=True,
        cu_seqlens_q=starts(cu_seqlens_q),
        cu_seqlens_k=starts(cu_seqlens_k),
    )
    return replace(packed, keys=longest[1], width=D, extras=1)


def _simple(
    name: str,
    shapes: dict[str, tuple[int, ...]],
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    *,
    dropout: bool = False,
    **more: Callable[[torch.device], Tensor],
) -> Problem:
    def inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        made = {key: _random(*shape, scale=shape[-1] ** -0.25)(device, dtype) for key, shape in shapes.items()}
        return {**made, **{key: make(device) for key, make in more.items()}}

    return Problem(name, inputs, ours, theirs, dropout)


def _targets(rows: int, vocabulary: int) -> Callable[[torch.device], Tensor]:
    def make(device: torch.device) -> Tensor:
        target = torch.randint(1, vocabulary, (rows,), device=device)
        target[::5] = 0  # padding
        return target

    return make


def _same(name: str, function: str, shapes: dict[str, tuple[int, ...]], **options: Any) -> Problem:
    """An operator with the same arguments as its specification."""
    return _simple(
        name + (" dropout" if options["dropout_p"] else ""),
        shapes,
        lambda seed, **t: getattr(F, function)(**t, seed=seed, **options),
        lambda seed, **t: getattr(reference, function)(**t, seed=seed, **options),
        dropout=options["dropout_p"] > 0,
    )


def _norms(M: int, N: int, p: float) -> list[Problem]:
    norm, rows = {"weight": (N,), "bias": (N,)}, {"x": (M, N), "residual": (M, N)}
    drop = {"dropout_p": p, "site": 5}
    return [
        _simple(
            f"layer_norm {M}x{N}",
            {"x": (M, N), **norm},
            lambda seed, x, weight, bias: F.layer_norm(x, weight, bias),
            lambda seed, x, weight, bias: reference.layer_norm(x, weight, bias),
        ),
        _same(f"residual_layer_norm {M}x{N}", "residual_layer_norm", {**rows, **norm}, **drop),
        _same(f"residual_add {M}x{N}", "residual_add", rows, **drop),
    ]


def _rms_norm(M: int, N: int, p: float) -> Problem:
    shapes = {"x": (M, N), "residual": (M, N), "weight": (N,)}
    return _same(f"residual_rms_norm {M}x{N}", "residual_rms_norm", shapes, dropout_p=p, site=5)


def _feed_forward(M: int, N: int, hidden: int, p: float, activation: str = "relu") -> Problem:
    shapes = {"x": (M, N), "weight1": (hidden, N), "bias1": (hidden,), "weight2": (N, hidden), "bias2": (N,)}
    name = f"feed_forward {activation} {M}x{N}x{hidden}"
    return _same(name, "feed_forward", shapes, dropout_p=p, site=7, activation=activation)


def _cross_entropy(M: int, N: int, V: int) -> list[Problem]:
    options: dict[str, Any] = {"label_smoothing": 0.1, "ignore_index": 0}
    return [
        _simple(
            f"cross_entropy {M}x{V}",
            {"logits": (M, V)},
            lambda seed, logits, target: F.cross_entropy(logits, target, **options)[0],
            lambda seed, logits, target: torch.nn.functional.cross_entropy(logits.float(), target, **options),
            target=_targets(M, V),
        ),
        _simple(
            f"linear_cross_entropy {M}x{N}x{V}",
            {"hidden": (M, N), "weight": (V, N)},
            lambda seed, hidden, weight, target: F.linear_cross_entropy(hidden, weight, target, **options)[0],
            lambda seed, hidden, weight, target: torch.nn.functional.cross_entropy(
                (hidden @ weight.T).float(), target, reduction="sum", **options
            ),
            target=_targets(M, V),
        ),
    ]


def _embed(B: int, L: int, N: int, V: int, p: float) -> Problem:
    options: dict[str, Any] = {"scale": N**0.5, "pad_id": 0, "dropout_p": p, "site": 1}
    return _simple(
        f"embed {B}x{L}x{N}" + (" dropout" if p else ""),
        {"weight": (V, N), "positions": (L, N)},
        lambda seed, weight, positions, tokens: F.embed(tokens, weight, positions.detach(), seed=seed, **options),
        lambda seed, weight, positions, tokens: reference.embed(
            tokens, weight, positions.detach(), seed=seed, **options
        ),
        dropout=p > 0,
        tokens=lambda device: _targets(B * L, V)(device).view(B, L),
    )


SCORED: dict[str, Any] = {
    "causal": "bottom_right", "window": (90, 0), "softcap": 3.0, "slopes": True, "sinks": True,
}  # fmt: skip
ATTENTION: list[Problem] = [
    # every size class of rows and of heads: 64, 128, 256, narrower and odd sizes
    _attention(2, 2, 9, 9, 64, 64, causal=True, p=0.1),
    _attention(3, 2, 27, 27, 64, 64, lengths=[27, 14, 1], p=0.1),
    _attention(2, 2, 25, 29, 64, 64, causal=True),
    _attention(2, 2, 60, 50, 64, 64, p=0.1),
    _attention(2, 2, 100, 100, 64, 64, causal=True, p=0.1),
    _attention(2, 3, 100, 77, 32, 48, lengths=[77, 0]),
    _attention(2, 2, 300, 257, 64, 64, p=0.1),
    _attention(1, 2, 513, 513, 64, 64, causal=True),
    _attention(1, 1, 20, 1100, 64, 64, lengths=[1030]),
    _attention(1, 1, 20, 2100, 64, 64, p=0.1),
    _attention(1, 1, 7, 9000, 64, 64, p=0.1),
    _attention(2, 2, 14, 16, 128, 128, p=0.1),
    _attention(2, 1, 30, 25, 128, 80, causal=True),
    _attention(1, 2, 64, 64, 128, 128, p=0.1),
    _attention(1, 1, 130, 130, 128, 128, causal=True, lengths=[100]),
    _attention(1, 1, 70, 140, 128, 128, causal=True, p=0.1),
    _attention(1, 1, 64, 64, 256, 256, p=0.1),
    _attention(1, 1, 100, 300, 200, 256, causal=True),
    _attention(2, 2, 1, 40, 40, 40, causal=True, causal_offset=30),
    # query heads that share keys
    _attention(1, 4, 70, 150, 64, 64, key_heads=2, causal=True, p=0.1),
    _attention(1, 2, 70, 150, 128, 128, key_heads=1),
    # masks, and with dropout where that takes another tile
    _attention(2, 2, 20, 16, 64, 64, mask="add", p=0.1),
    _attention(2, 2, 20, 50, 16, 16, mask="bool", lengths=[50, 31]),
    _attention(2, 2, 30, 30, 64, 64, mask="bool", p=0.1),
    _attention(2, 2, 40, 40, 32, 32, mask="add", causal=True, p=0.1),
    _attention(1, 2, 90, 120, 64, 64, mask="add", p=0.1),
    _attention(1, 2, 200, 200, 64, 64, mask="add"),
    _attention(1, 2, 200, 200, 64, 64, mask="bool", causal=True, p=0.1),
    _attention(1, 1, 40, 60, 64, 64, mask="add", p=0.1),
    _attention(1, 2, 30, 30, 128, 128, mask="add", p=0.1),
    _attention(1, 1, 70, 60, 128, 128, mask="add", p=0.1),
    _attention(1, 1, 150, 150, 128, 128, mask="add", p=0.1),
    _attention(1, 1, 40, 150, 256, 256, mask="add", p=0.1),
    # windows, soft caps, ALiBi and sinks: all with short rows, each alone and all with long rows
    _attention(2, 2, 30, 40, 64, 64, window=(9, 3), softcap=2.0, slopes=True, sinks=True, p=0.1),
    _attention(1, 2, 400, 400, 64, 64, causal=True, window=(70, 0), p=0.1),
    _attention(1, 2, 130, 300, 128, 128, causal="bottom_right", window=(100, 0), key_heads=1),
    _attention(1, 2, 100, 200, 64, 64, softcap=3.0),
    _attention(1, 2, 100, 200, 64, 64, slopes=True, causal=True),
    _attention(1, 2, 100, 200, 64, 64, sinks=True, lengths=[150]),
    _attention(2, 2, 150, 200, 64, 64, **SCORED, mask="add", lengths=[200, 90], p=0.1),
    _packed([0, 20, 20, 27], [0, 5, 20, 50], 2, 64, causal=False),
    _packed([0, 100, 107], [0, 90, 97], 2, 64, causal=False),
    _packed([0, 200, 207], [0, 200, 207], 1, 32, causal=True),
    _packed([0, 70, 107], [0, 150, 157], 1, 128, causal=False),
    _packed_qkv(3, 27, None, 2, 64, causal=True),
    _packed_qkv(2, 140, None, 2, 64, causal=True),
    _packed_qkv(2, 20, 30, 2, 64, causal=False),
]
"""Problems for every route that supports them: test_attention_routes.py."""

PROBLEMS: list[Problem] = [
    *ATTENTION,
    _weights(2, 2, 30, 45, 64),
    _weights(1, 2, 20, 300, 64),
    _weights(1, 1, 5, 9000, 16),
    *_norms(37, 512, 0.1),
    *_norms(1, 1000, 0.0),
    *_norms(300, 1024, 0.1),
    _rms_norm(37, 512, 0.1),
    _rms_norm(3, 5000, 0.0),
    _feed_forward(100, 64, 256, 0.0),
    _feed_forward(257, 128, 384, 0.1),
    _feed_forward(100, 64, 256, 0.0, "gelu_tanh"),
    _feed_forward(257, 128, 384, 0.1, "gelu"),
    _feed_forward(257, 128, 384, 0.1, "silu"),
    *_cross_entropy(65, 64, 1000),
    *_cross_entropy(20, 32, 9001),
    _embed(3, 17, 512, 1000, 0.1),
    _embed(2, 5, 100, 50, 0.0),
]
