"""Compile cases of masked_softmax.py."""

from collections.abc import Iterator
from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.masked_softmax import ONE_PASS, _backward, _forward
from fasttfm.kernels.proof.attention_case import attention_case, variant_name
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.tiles.attention import MASKED_SOFTMAX


def compile_cases(chip: Chip) -> Iterator[CompileCase]:
    """Every tile in half precision, causal with lengths, dropout and a mask; at one size walked rows, and every dtype
    with every mask, and with a window, a soft cap, ALiBi and sinks."""
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
    variant: dict[str, Any] = {"dropout": True, "mask": "none", "scoring": scoring}
    variant |= {} if scoring else {"scores": None, "scale": None}
    yield attention_case(_backward, name, kind, MASKED_SOFTMAX(chip, columns), ONE=one, S="i32", **variant)


def _forward_case(
    chip: Chip, kind: str, columns: int, *, mask: str = "add", one: bool = True, scoring: bool = False
) -> CompileCase:
    """The keys of a row come in any number."""
    variant: dict[str, Any] = {"dropout": True, "mask": mask, "scoring": scoring}
    name = f"masked_softmax.forward/{variant_name(**variant)}{'' if one else '/walked'}/S{columns}"
    tile = MASKED_SOFTMAX(chip, columns)
    variant |= {} if scoring else {"lse": None}
    return attention_case(_forward, name, kind, tile, ONE=one, CAUSAL=True, S="i32", **variant)
