"""Compile cases of layer_norm.py."""

from collections.abc import Iterator, Mapping

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.layer_norm import WIDEST, _backward, _column_sums, _forward, tile
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.tiles.rows import COLUMN_SUMS, MAX_COLUMNS, NARROWEST


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in its heaviest variant (residual, dropout, both parameters); at N = 512, lighter variants and every
    combination of dtypes that models have, with or without autocast."""
    columns = NARROWEST
    while columns <= MAX_COLUMNS:
        for dtype in ("fp32", "bf16"):
            yield _forward_case(chip, columns, dtype)
            yield _backward_case(chip, columns, dtype)
        columns *= 2
    for dtype, others in (("bf16", {"residual": "fp32"}), ("fp16", _SAME)):
        yield _backward_case(chip, MAX_COLUMNS, dtype, others)
    yield _backward_case(chip, MAX_COLUMNS, "bf16", without=("dy2", "mean"))
    for dtype, others in (("fp32", _SAME), ("fp16", _SAME), ("bf16", _SAME), ("bf16", {"residual": "fp32"})):
        yield _sums_case(chip, dtype, others)
    yield _sums_case(chip, "bf16", without=("mean",))
    yield _forward_case(chip, 512, "fp16")
    yield _backward_case(chip, 512, "fp16")
    for dtype in ("fp16", "bf16"):
        for others in ({"residual": "fp32"}, {"parameter": dtype}):
            yield _forward_case(chip, 512, dtype, others)
            yield _backward_case(chip, 512, dtype, others)
        yield _forward_case(chip, 512, dtype, {"parameter": dtype}, without=_PLAIN)
    for dtype in ("fp32", "fp16", "bf16"):
        yield _forward_case(chip, 512, dtype, without=_PLAIN)
        yield _forward_case(chip, 512, dtype, without=("seed",))
        yield _backward_case(chip, 512, dtype, without=("ds", "dy2", "seed", "dx"))
        yield _backward_case(chip, 512, dtype, without=("dy2", "seed", "dx"))
        yield _backward_case(chip, 512, dtype, without=("ds", "dy2"))
        yield _backward_case(chip, 512, dtype, without=("ds",))
        yield _forward_case(chip, 512, dtype, without=("mean", "bias"))
        yield _forward_case(chip, 512, dtype, without=(*_PLAIN, "mean", "bias"))
        yield _backward_case(chip, 512, dtype, without=("dy2", "mean"))
        yield _backward_case(chip, 512, dtype, without=("ds", "dy2", "seed", "dx", "mean"))


_PLAIN = ("residual", "x_bias", "s", "seed")
"""Absent parameters of plain LayerNorm."""
_SAME: dict[str, str] = {}
"""Residual stream in x's dtype, parameters in float32."""


def _forward_case(
    chip: Chip, N: int, dtype: str, dtypes: Mapping[str, str] = _SAME, *, without: tuple[str, ...] = ()
) -> CompileCase:
    words = ["rms"] * ("mean" in without)
    words += ["residual"] * ("residual" not in without) + ["dropout"] * ("seed" not in without)
    block = tile(chip, N, backward=False)
    name = f"layer_norm.forward/{_variant(words, dtypes)}/N{N}"
    return kernel_case(_forward, name, dtype, block, dtypes=dtypes, **dict.fromkeys(without))


def _backward_case(
    chip: Chip, N: int, dtype: str, dtypes: Mapping[str, str] = _SAME, *, without: tuple[str, ...] = ("dy2",)
) -> CompileCase:
    words = ["rms"] * ("mean" in without)
    words += ["ds"] * ("ds" not in without) + ["twice"] * ("dy2" not in without) + ["dropout"] * ("seed" not in without)
    words += ["sums-apart"] * (N > WIDEST)
    block = tile(chip, N, backward=True)
    name = f"layer_norm.backward/{_variant(words, dtypes)}/N{N}"
    without += ("parts", "x_parts") * (N > WIDEST)
    return kernel_case(_backward, name, dtype, block, dtypes=dtypes, **dict.fromkeys(without))


def _sums_case(
    chip: Chip, dtype: str, dtypes: Mapping[str, str] = _SAME, *, without: tuple[str, ...] = ()
) -> CompileCase:
    name = f"layer_norm.column_sums/{_variant(['rms'] * bool(without), dtypes)}"
    return kernel_case(_column_sums, name, dtype, COLUMN_SUMS(chip), dtypes=dtypes, **dict.fromkeys(without))


def _variant(words: list[str], dtypes: Mapping[str, str]) -> str:
    """The variant in the name of a case."""
    return "+".join([*(words or ["plain"]), *(f"{dtype}-{what}" for what, dtype in dtypes.items())])
