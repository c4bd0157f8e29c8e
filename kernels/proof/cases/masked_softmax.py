"""Compile cases of masked_softmax.py."""

from collections.abc import Iterator

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.masked_softmax import ONE_PASS, _backward, _forward
from fasttfm.kernels.proof.attention_case import Variant, attention_case
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import MASKED_SOFTMAX


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in half precision, causal with lengths, dropout and a mask; at one size each, rows longer than a tile,
    and every dtype with every mask, and with a window, a soft cap, ALiBi and sinks."""
    for kind in ("bf16", "fp16"):
        for columns in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, ONE_PASS):
            yield from _cases(chip, kind, columns)
        yield from _cases(chip, kind, 2048, one=False)
    yield from _cases(chip, "fp32", 128)
    for kind in ("bf16", "fp16", "fp32"):
        for mask in ("none", "bool"):
            yield _forward_case(chip, kind, 128, mask=mask)
        yield from _cases(chip, kind, 128, scoring=True)
    yield from _cases(chip, "fp16", 1024, scoring=True)
    yield from _cases(chip, "fp16", 2048, one=False, scoring=True)


def _cases(chip: Chip, kind: str, columns: int, *, one: bool = True, scoring: bool = False) -> Iterator[CompileCase]:
    yield _forward_case(chip, kind, columns, mask="none" if scoring else "add", one=one, scoring=scoring)
    name = f"masked_softmax.backward/dropout{'+cap' * scoring}{'' if one else '/walked'}/S{columns}"
    absent = dict.fromkeys(() if scoring else ("scores", "scale"))
    tile, variant = MASKED_SOFTMAX(chip, columns), Variant(scoring=scoring)
    yield attention_case(_backward, name, kind, tile, variant, ONE=one, S="i32", **absent)


def _forward_case(
    chip: Chip, kind: str, columns: int, *, mask: str = "add", one: bool = True, scoring: bool = False
) -> CompileCase:
    """One case of the forward pass, for any number of keys."""
    tile, variant = MASKED_SOFTMAX(chip, columns), Variant(mask=mask, scoring=scoring)
    name = f"masked_softmax.forward/{variant}{'' if one else '/walked'}/S{columns}"
    absent = dict.fromkeys(() if scoring else ("lse",))
    return attention_case(_forward, name, kind, tile, variant, ONE=one, CAUSAL=True, S="i32", **absent)
