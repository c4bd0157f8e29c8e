"""Compile cases of the attention kernels and their softmax: the arguments of every variant of a call."""

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fasttfm.kernels.attention import launch
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.parameter import each_of, kinds_of
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.tiles.attention import Tile

WIDTHS = (64, 128, 256)
"""Head dims with tiles of their own. Narrower heads use the tile of 64 and fewer resources."""

MASKS = ("none", "bool", "add")
"""No mask, a boolean mask, a mask added to the scores."""

SHARED = 4
"""Query heads per key head in cases with shared keys."""

FAR = ("sm_80", "sm_90")
"""Chips with cases of 64-bit offsets."""

UNEVEN = ("sm_90", "sm_100")
"""Chips with cases of uneven strides: launch.stages_for() makes an exception of them."""

_SUMS = ("dq_sums", "dk_sums", "dv_sums")
_SCORING = ("offsets", "softcap", "slopes", "sinks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Options of an attention call; as a string, part of the names of its cases."""

    dropout: bool = True
    mask: str = "none"
    """One of MASKS."""
    packed: bool = False
    sums: bool = False
    """With column sums of the gradients, for the bias of a projection."""
    shared: bool = False
    """Query heads share key heads."""
    window: bool = False
    scoring: bool = False
    """With a window, a soft cap, ALiBi and sinks."""
    far: bool = False
    """With 64-bit row offsets."""
    uneven: bool = False
    """Queries and keys with strides that are not multiples of 16 elements, unlike values."""

    def __str__(self) -> str:
        words = ["causal", "packed" if self.packed else "lengths", "dropout" * self.dropout]
        words += [f"{self.mask}-mask" * (self.mask != "none"), "sums" * self.sums, "shared" * self.shared]
        words += ["window" * self.window, "scoring" * self.scoring, "far" * self.far]
        words += ["uneven" * self.uneven]
        return "+".join(filter(None, words))

    def extras(self, kind: str) -> int:
        """launch.extras() of this variant."""
        scored = self.window or self.scoring
        return launch.extras(kind, self.dropout, self.mask != "none", shared=self.shared, scored=scored)


def attention_case(kernel: Any, name: str, kind: str, tile: Tile, variant: Variant, **constants: Any) -> CompileCase:
    """The case of an attention kernel as a model calls it, with strides that are multiples of 16 elements.

    name: family, kernel and variant; the tile is appended, with one stage for an uneven variant (launch.stages_for()).
    constants: the kernel's constants, or overrides of arguments.
    """
    far = (None,) * variant.far
    kinds = kinds_of(kernel)
    pointers = [name for name, kind in kinds.items() if kind == "Pointer"]
    uneven = ("q", "k", "dq", "dk") if variant.uneven else ()
    tile = replace(tile, stages=1) if uneven else tile
    absent = ("seed",) * (not variant.dropout) + _SUMS * (not variant.sums) + _SCORING * (not variant.scoring)
    absent += ("window",) * (not (variant.window or variant.scoring))
    arguments: dict[str, Any] = {
        "mask": {"none": None, "bool": "*u8", "add": f"*{'fp32' if kind == 'tf32' else kind}"}[variant.mask],
        "spans": (None, "*i64", "*i64") if variant.packed else ("*i64", None, None),
        "strides": tuple(("i32" if name in uneven else "i32:16",) * 3 + far for name in pointers),
        "sum_strides": ("i32:16",) * 2,
        "mask_strides": (*["i32:16"] * 3, 1, *far),
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
        "GROUP": SHARED if variant.shared else 1,
        **dict.fromkeys(absent),
        **constants,
    }
    taken = {*kernel.arg_names, *(field for _, field, _ in each_of(kinds.items()))}
    return kernel_case(kernel, name, kind, tile, **{key: value for key, value in arguments.items() if key in taken})


def head_case(
    kernel: Any, name: str, kind: str, tile: Tile, width: int, variant: Variant, **constants: Any
) -> CompileCase:
    """attention_case() of a causal kernel with head dim `width`; name: family and kernel."""
    constants |= {"D": width, "DV": width, "CAUSAL": True}
    return attention_case(kernel, f"{name}/{variant}/D{width}", kind, tile, variant, **constants)


def product_kinds(chip: Chip) -> tuple[str, ...]:
    """Kinds of products that compile differently: with matrix units, float16 compiles like bfloat16."""
    if chip.capability >= 80:
        return ("bf16", "fp32", "tf32")
    return ("bf16", "fp32") if chip.matrix_units else ("bf16", "fp16", "fp32")


def every_kind(chip: Chip) -> tuple[str, ...]:
    """product_kinds() and float16."""
    return tuple(dict.fromkeys((*product_kinds(chip), "fp16")))


def distinct(compile_cases: Callable[[Chip], Iterator[CompileCase]]) -> Callable[[Chip], Collection[CompileCase]]:
    """Decorator for compile_cases() that drops repeated cases."""

    @functools.wraps(compile_cases)
    def once(chip: Chip) -> Collection[CompileCase]:
        return {(case.name, case.dtype): case for case in compile_cases(chip)}.values()

    return once
