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


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile that ships, for every kind of product, with dropout; the lighter variants in bfloat16."""
    relu: dict[str, Any] = {"ACTIVATION": "relu", "before": None}
    relu_backward: dict[str, Any] = {"ACTIVATION": "relu", "hidden": None, "seed": None}
    gelu: dict[str, Any] = {"ACTIVATION": "gelu", "bits": None}
    for kind in ("fp32", "tf32", "fp16", "bf16"):
        if kind == "tf32" and chip.capability < 80:
            continue
        small, large = (PRODUCT.shipped(chip, kind, size) for size in ("small", "large"))
        even: dict[str, Any] = {"EVEN_K": True, "PRECISION": "tf32" if kind == "tf32" else "ieee"}
        odd = even | {"EVEN_K": False, "K": "i32"}
        lighter = kind == "bf16"
        neighbours = {"NEIGHBOURS": product.needs_neighbours(chip, kind)}
        for tile in dict.fromkeys((small, large)):
            given = even | relu
            yield kernel_case(_forward, "feed_forward.forward/dropout", kind, tile, given=given | neighbours)
            if lighter:
                yield kernel_case(
                    _forward, "feed_forward.forward/plain", kind, tile, given=given | {"seed": None} | neighbours
                )
            yield kernel_case(_forward, "feed_forward.forward/erf+dropout", kind, tile, given=even | gelu | neighbours)
            given = even | relu_backward
            yield kernel_case(_backward, "feed_forward.backward/bits", kind, tile, given=given | {"kept": None})
            if lighter:
                yield kernel_case(_backward, "feed_forward.backward/sign", kind, tile, given=given | {"bits": None})
        for tile in dict.fromkeys(map(of_two_results, (small, large))):
            yield kernel_case(_backward, "feed_forward.backward/erf+dropout", kind, tile, given=even | gelu)
        yield kernel_case(
            _forward, "feed_forward.forward/dropout+odd-depth", kind, small, given=odd | relu | neighbours
        )
        if lighter:
            given = odd | gelu
            yield kernel_case(
                _forward, "feed_forward.forward/erf+dropout+odd-depth", kind, small, given=given | neighbours
            )
            for name, variant in (("tanh+dropout", {"ACTIVATION": "gelu_tanh"}), ("erf", {"seed": None})):
                given = even | gelu | variant
                yield kernel_case(_forward, f"feed_forward.forward/{name}", kind, large, given=given | neighbours)
                tile = of_two_results(large)
                yield kernel_case(_backward, f"feed_forward.backward/{name}", kind, tile, given=given)
    for dtype in ("fp32", "fp16", "bf16"):
        yield kernel_case(_gate, "feed_forward.gate", dtype, COLUMN_SUMS(chip), given=relu_backward)
        yield kernel_case(_gate, "feed_forward.gate/erf", dtype, COLUMN_SUMS(chip), given={"ACTIVATION": "gelu"})
        for N in (128, 256, 512) if dtype == "bf16" else (512,):
            given = {"ACTIVATION": "gelu"}
            yield kernel_case(_activate, "feed_forward.activate/erf", dtype, pass_tile(chip, N), given=given)
