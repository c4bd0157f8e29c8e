"""Compile cases of feed_forward.py."""

from collections.abc import Iterator
from typing import Any

from fasttfm.kernels import product
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.feed_forward import _activate, _backward, _forward, _gate
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.residual_add import tile as pass_tile
from fasttfm.kernels.tiles.feed_forward import PRODUCT, of_two_results
from fasttfm.kernels.tiles.rows import COLUMN_SUMS

_RELU: dict[str, Any] = {"ACTIVATION": "relu", "before": None}
_RELU_BACKWARD: dict[str, Any] = {"ACTIVATION": "relu", "hidden": None, "seed": None}
_GELU: dict[str, Any] = {"ACTIVATION": "gelu", "bits": None}


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every shipped tile, for every kind of product, with dropout; lighter variants in bfloat16."""
    for kind in ("fp32", "tf32", "fp16", "bf16"):
        if kind != "tf32" or chip.capability >= 80:
            yield from _product_cases(chip, kind)
    columns = COLUMN_SUMS(chip)
    for dtype in ("fp32", "fp16", "bf16"):
        yield kernel_case(_gate, "feed_forward.gate", dtype, columns, **_RELU_BACKWARD)
        yield kernel_case(_gate, "feed_forward.gate/erf", dtype, columns, ACTIVATION="gelu")
        for N in (128, 256, 512) if dtype == "bf16" else (512,):
            yield kernel_case(_activate, "feed_forward.activate/erf", dtype, pass_tile(chip, N), ACTIVATION="gelu")


def _product_cases(chip: Chip, kind: str) -> Iterator[CompileCase]:
    small, large = (PRODUCT.shipped(chip, kind, size) for size in ("small", "large"))
    even: dict[str, Any] = {"EVEN_K": True, "PRECISION": "tf32" if kind == "tf32" else "ieee"}
    forward = even | {"NEIGHBOURS": product.needs_neighbours(chip, kind)}
    odd = forward | {"EVEN_K": False, "K": "i32"}
    lighter = kind == "bf16"
    for tile in dict.fromkeys((small, large)):
        yield kernel_case(_forward, "feed_forward.forward/dropout", kind, tile, **forward, **_RELU)
        if lighter:
            yield kernel_case(_forward, "feed_forward.forward/plain", kind, tile, **forward, **_RELU, seed=None)
        yield kernel_case(_forward, "feed_forward.forward/erf+dropout", kind, tile, **forward, **_GELU)
        yield kernel_case(_backward, "feed_forward.backward/bits", kind, tile, **even, **_RELU_BACKWARD, kept=None)
        if lighter:
            yield kernel_case(_backward, "feed_forward.backward/sign", kind, tile, **even, **_RELU_BACKWARD, bits=None)
    for tile in dict.fromkeys(map(of_two_results, (small, large))):
        yield kernel_case(_backward, "feed_forward.backward/erf+dropout", kind, tile, **even, **_GELU)
    yield kernel_case(_forward, "feed_forward.forward/dropout+odd-depth", kind, small, **odd, **_RELU)
    if lighter:
        yield kernel_case(_forward, "feed_forward.forward/erf+dropout+odd-depth", kind, small, **odd, **_GELU)
        activations = (("tanh", "gelu_tanh"), ("logistic", "silu"))
        others: dict[str, dict[str, Any]] = {f"{name}+dropout": {"ACTIVATION": each} for name, each in activations}
        others["erf"] = {"seed": None}
        for name, variant in others.items():
            other = _GELU | variant
            yield kernel_case(_forward, f"feed_forward.forward/{name}", kind, large, **forward, **other)
            yield kernel_case(_backward, f"feed_forward.backward/{name}", kind, of_two_results(large), **even, **other)
