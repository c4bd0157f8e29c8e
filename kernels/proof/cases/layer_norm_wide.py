"""Compile cases of layer_norm_wide.py."""

from collections.abc import Iterator

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.layer_norm_wide import _backward, _column_sums
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.tiles.rows import COLUMN_SUMS, LAYER_NORM_WIDE


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """With dropout and a gradient of s, for every combination of dtypes that a model has."""
    dtypes: list[tuple[str, dict[str, str]]] = [("fp32", {})]
    for dtype in ("fp16", "bf16"):
        dtypes += [(dtype, {}), (dtype, {"residual": "fp32"}), (dtype, {"parameter": dtype})]
    for dtype, others in dtypes:
        suffix = "".join(f"+{kind}-{what}" for what, kind in others.items())
        name = f"layer_norm_wide.backward/ds+dropout{suffix}"
        yield kernel_case(_backward, name, dtype, LAYER_NORM_WIDE(chip), dtypes=others)
        if "parameter" not in others:
            name = f"layer_norm_wide.column_sums/rows{suffix}"
            yield kernel_case(_column_sums, name, dtype, COLUMN_SUMS(chip), dtypes=others)
    rms = {"mean": None}
    yield kernel_case(_backward, "layer_norm_wide.backward/rms+ds+dropout", "bf16", LAYER_NORM_WIDE(chip), given=rms)
    yield kernel_case(_column_sums, "layer_norm_wide.column_sums/rms+rows", "bf16", COLUMN_SUMS(chip), given=rms)
