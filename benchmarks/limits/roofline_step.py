"""Where the time of a training step must go: products at a device's rate, everything else as passes over its memory.

The fused column is kernels.costs.training_step: every launch no faster than the busier of products and bytes. The other
two count what PyTorch does to the same step under autocast, pass by pass over the tensors (a pass reads or writes one
tensor once; a float32 tensor is two passes of its half-precision one). They are a model on paper until measured beside.
Letters as in kernels.costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import Cost, Machine, Shape

MODELS: dict[str, Shape] = {
    "paper-base": Shape(d_model=512, heads=8, d_ff=2048, vocabulary=37_000),
    "paper-big": Shape(d_model=1024, heads=16, d_ff=4096, vocabulary=37_000),
}
"""Vaswani et al. 2017, table 3, with the shared vocabulary of WMT14 English-German."""

LENGTH = 37
"""sum(l^2) / sum(l) over sentences of about 27 tokens: what attention's cost goes with, longer than the mean sentence.
The plan's 0.382 and 1.292 GFLOP a target token follow from it."""

_HALF = 2  # bytes: the step is counted under autocast

# Passes at one site, in the unit named: "rows" (T, d_model), "hidden" (T, d_ff), "scores" (H, T, L), "logits" (T, V)
# in half precision, "weights" (all parameters) and "table" (V, d_model) in float32.
_EAGER: Mapping[str, Mapping[str, float]] = {
    # to float32 3, log_softmax 4, sum for the smoothing 2; backward: zeros 2, smoothing added 4, log_softmax 6, back 3
    "logits and cross entropy": {"logits": 24},
    # both ways: 12 for products, 16 for copies from and to heads; scale, mask, softmax and their gradients apart: 19
    "attention": {"rows": 28, "scores": 19},
    # dropout 2.5 (a byte of mask), add 3, LayerNorm 2; backward: LayerNorm 5, dropout 2.5, gradients added 3
    "residual, dropout, LayerNorm": {"rows": 18},
    # ReLU 2, its gradient 3, first bias gradient 1; second bias gradient
    "FFN": {"hidden": 6, "rows": 1},
    # 12 bias gradients; q, k, v apart: their input gradients added 12; the memory's added over k, v and layers 6
    "projections": {"rows": 12 + 18},
    # Adam tensor by tensor 18, gradients zeroed 1, half-precision copies 1.5; the table's three gradients zeroed and
    # added 8; gather, scale, position and dropout of both sides, and back: 26
    "Adam and embedding": {"weights": 20.5, "table": 8, "rows": 26},
}
_COMPILED: Mapping[str, Mapping[str, float]] = {
    # maximum, sum, loss; backward reads and writes
    "logits and cross entropy": {"logits": 5},
    # SDPA's flash kernels: forward 4; backward 8, delta 2, dQ summed in float32 4
    "attention": {"rows": 18},
    # forward 4; backward 4, parameter gradients 2, gradients added 2
    "residual, dropout, LayerNorm": {"rows": 12},
    "FFN": {"hidden": 6, "rows": 1},  # products stay cuBLAS calls: ReLU and bias gradients are passes as before
    "projections": {"rows": 12 + 6},  # q, k, v in one product; the memory's gradients are still added
    # fused Adam 7, half-precision copies 1.5; embeddings as before
    "Adam and embedding": {"weights": 8.5, "table": 8, "rows": 26},
}


@dataclass(frozen=True, slots=True)
class Part:
    """Milliseconds of one part of a step, three ways."""

    name: str
    eager: float
    compiled: float
    """torch.compile, SDPA and fused Adam."""
    fused: float
    products: float
    """Of each of the three, what matrix products take."""


def _sites(shape: Shape) -> dict[str, int]:
    layers = shape.layers
    return {
        "logits and cross entropy": 1,
        "attention": 3 * layers,
        "residual, dropout, LayerNorm": 5 * layers,
        "FFN": 2 * layers,
        "projections": layers,
        "Adam and embedding": 1,
    }


def step(shape: Shape, machine: Machine, *, tokens: int = 25_000, length: int = LENGTH) -> list[Part]:
    """The parts of a step on as many source and target tokens without padding, in half precision."""
    d = shape.d_model
    unit = {
        "rows": _HALF * tokens * d,
        "hidden": _HALF * tokens * shape.d_ff,
        "scores": _HALF * tokens * shape.heads * length,
        "logits": _HALF * tokens * shape.vocabulary,
        "weights": 4 * costs.parameters(shape),
        "table": 4 * shape.vocabulary * d,
    }
    sites, result = _sites(shape), []
    for name, pieces in costs.training_step(shape, tokens=tokens, length=length, size=_HALF).items():
        fused = 1e3 * sum(cost.seconds(machine) for cost in pieces)
        # attention's products are too small to be counted apart from its bytes
        products = 0.0 if name == "attention" else 1e3 * sum(c.seconds(machine) for c in pieces if c.flops)

        def passes(counts: Mapping[str, Mapping[str, float]], name: str = name, products: float = products) -> float:
            moved = sites[name] * sum(times * unit[what] for what, times in counts[name].items())
            return products + 1e3 * moved / machine.bandwidth

        result.append(Part(name, passes(_EAGER), passes(_COMPILED), fused, products))
    return result


def total(parts: list[Part]) -> Part:
    """All parts of a step together."""
    return Part(
        "total",
        *(sum(getattr(part, column) for part in parts) for column in ("eager", "compiled", "fused", "products")),
    )


def cells(parts: list[Part]) -> list[tuple[str, ...]]:
    """Every part and the total as rows of a table: name, eager, compiled, fused, products."""
    return [
        (part.name, *(f"{ms:.1f}" for ms in (part.eager, part.compiled, part.fused, part.products)))
        for part in (*parts, total(parts))
    ]


def cost(shape: Shape, *, tokens: int = 25_000, length: int = LENGTH) -> Cost:
    """Everything that the fused step does, launches included."""
    pieces = costs.training_step(shape, tokens=tokens, length=length, size=_HALF).values()
    return sum((piece for part in pieces for piece in part), start=Cost())


def model_flops(shape: Shape, *, tokens: int = 25_000, length: int = LENGTH) -> int:
    """What the mathematics of a step needs: nothing computed twice, as model FLOPs utilisation counts.

    Each weight is multiplied with each of its tokens once forward and twice backward, 6 FLOPs; so is attention, in
    full though half of a causal score is masked (the counter of the published figures).
    """
    layers, d = shape.layers, shape.d_model
    products = 6 * tokens * costs.parameters(shape)
    attention = 3 * layers * 3 * (4 * tokens * length * d)
    return products + attention
