"""Where the time of a training step must go: products at a device's rate, everything else as passes over its memory.

The fused column is kernels.costs.training_step: every launch no faster than the busier of products and bytes. The other
two count what PyTorch does to the same step under autocast, pass by pass over the tensors (a pass reads or writes one
tensor once; a float32 tensor is two passes of its half-precision one). They are a model on paper until measured beside.
Letters as in kernels.costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import Cost, Machine, Shape
from fasttfm.parsing import parse_yaml

Passes = Mapping[str, Mapping[str, float]]
"""Part of a step -> tensor -> passes over it."""

MODELS: dict[str, Shape] = {
    "paper-base": Shape(d_model=512, heads=8, d_ff=2048, vocabulary=37_000),
    "paper-big": Shape(d_model=1024, heads=16, d_ff=4096, vocabulary=37_000),
}
"""Vaswani et al. 2017, table 3, with the shared vocabulary of WMT14 English-German."""

LENGTH = 37
"""sum(l^2) / sum(l) over sentences of about 27 tokens: what attention's cost goes with, longer than the mean sentence.
The plan's 0.382 and 1.292 GFLOP a target token follow from it."""

_HALF = 2  # bytes: the step is counted under autocast

_PASSES: dict[str, Passes] = parse_yaml((Path(__file__).parent / "passes.yaml").read_bytes())


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

        def passes(counts: Passes, name: str = name, products: float = products) -> float:
            moved = sites[name] * sum(times * unit[what] for what, times in counts[name].items())
            return products + 1e3 * moved / machine.bandwidth

        result.append(Part(name, passes(_PASSES["eager"]), passes(_PASSES["compiled"]), fused, products))
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
