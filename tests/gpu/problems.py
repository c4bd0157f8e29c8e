"""Small problems for every operator: inputs, the kernel's way and the reference's way to compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """The same in plain PyTorch, in whatever precision the inputs have."""
    dropout: bool = False

    def __str__(self) -> str:
        return self.name


def _random(*shape: int, scale: float = 1.0) -> Callable[[torch.device, torch.dtype], Tensor]:
    return lambda device, dtype: (torch.randn(shape, device=device) * scale).to(dtype)


def _attention(B: int, H: int, L: int, S: int, D: int, Dv: int, *, p: float = 0.0, **options: Any) -> Problem:
    lengths = options.pop("lengths", None)

    def inputs(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        made = {
            "query": _random(B, L, H, D)(device, dtype).transpose(1, 2),  # the strides that a projection leaves
            "key": _random(B, H, S, D)(device, dtype),
            "value": _random(B, H, S, Dv)(device, dtype),
        }
        if lengths is not None:
            made["key_lengths"] = torch.tensor(lengths, device=device)
        return made

    def ours(seed: Tensor, **x: Tensor) -> Tensor:
        return F.attention(**x, dropout_p=p, seed=seed, stream=3, **options)

    def theirs(seed: Tensor, **x: Tensor) -> Tensor:
        return reference.attention(**x, dropout_p=p, seed=seed, stream=3, **options)[0]

    words = [f"attention {L}x{S} D{D}/{Dv}", *options, *(["lengths"] if lengths else []), *(["dropout"] if p else [])]
    return Problem(" ".join(words), inputs, ours, theirs, p > 0)


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


def _norms(M: int, N: int, p: float) -> list[Problem]:
    norm = {"weight": (N,), "bias": (N,)}
    drop = {"dropout_p": p, "stream": 5}
    label = f"{M}x{N}" + (" dropout" if p else "")
    return [
        _simple(
            f"layer_norm {M}x{N}",
            {"x": (M, N), **norm},
            lambda seed, x, weight, bias: F.layer_norm(x, weight, bias),
            lambda seed, x, weight, bias: reference.layer_norm(x, weight, bias),
        ),
        _simple(
            f"residual_layer_norm {label}",
            {"x": (M, N), "residual": (M, N), **norm},
            lambda seed, **t: F.residual_layer_norm(**t, seed=seed, **drop),
            lambda seed, **t: reference.residual_layer_norm(**t, seed=seed, **drop),
            dropout=p > 0,
        ),
        _simple(
            f"residual_add {label}",
            {"x": (M, N), "residual": (M, N)},
            lambda seed, **t: F.residual_add(**t, seed=seed, **drop),
            lambda seed, **t: reference.residual_add(**t, seed=seed, **drop),
            dropout=p > 0,
        ),
    ]


def _feed_forward(M: int, N: int, hidden: int, p: float) -> Problem:
    shapes = {"x": (M, N), "weight1": (hidden, N), "bias1": (hidden,), "weight2": (N, hidden), "bias2": (N,)}
    return _simple(
        f"feed_forward {M}x{N}x{hidden}" + (" dropout" if p else ""),
        shapes,
        lambda seed, **t: F.feed_forward(**t, dropout_p=p, seed=seed, stream=7),
        lambda seed, **t: reference.feed_forward(**t, dropout_p=p, seed=seed, stream=7),
        dropout=p > 0,
    )


def _cross_entropy(M: int, N: int, V: int) -> list[Problem]:
    options: dict[str, Any] = {"label_smoothing": 0.1, "ignore_index": 0}
    return [
        _simple(
            f"cross_entropy {M}x{V}",
            {"logits": (M, V)},
            lambda seed, logits, target: F.cross_entropy(logits, target, **options),
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
    options: dict[str, Any] = {"scale": N**0.5, "pad_id": 0, "dropout_p": p, "stream": 1}
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


PROBLEMS: list[Problem] = [
    _attention(3, 2, 27, 27, 64, 64, lengths=[27, 14, 1], p=0.1),
    _attention(2, 2, 100, 100, 64, 64, causal=True, p=0.1),
    _attention(2, 3, 100, 77, 32, 48, lengths=[77, 0]),
    _attention(2, 2, 300, 257, 64, 64, p=0.1),
    _attention(1, 2, 513, 513, 64, 64, causal=True),
    _attention(1, 1, 130, 130, 128, 128, causal=True, lengths=[100]),
    _attention(2, 2, 1, 40, 40, 40, causal=True, causal_offset=30),
    *_norms(37, 512, 0.1),
    *_norms(1, 1000, 0.0),
    *_norms(300, 1024, 0.1),
    _feed_forward(100, 64, 256, 0.0),
    _feed_forward(257, 128, 384, 0.1),
    *_cross_entropy(65, 64, 1000),
    *_cross_entropy(20, 32, 9001),
    _embed(3, 17, 512, 1000, 0.1),
    _embed(2, 5, 100, 50, 0.0),
]
