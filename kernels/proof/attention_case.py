"""Compile cases of attention's kernels and their softmax: what a call of each variant has for arguments."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.parameter import each_of, kinds_of
from fasttfm.kernels.proof.compile_case import CompileCase, kernel_case
from fasttfm.kernels.tiles.attention import Tile

WIDTHS = (64, 128, 256)
"""Head sizes that tiles are chosen for. Narrower heads take the tile of 64 and need less of everything."""

MASKS = ("none", "bool", "add")
"""Of a call: none, one that allows, one that is added to the scores."""

SHARED = 4
"""Query heads of a head of keys, in cases that share."""

FAR = ("sm_80", "sm_90")
"""Chips with cases of rows that are far apart."""


def attention_case(
    kernel: Any,
    name: str,
    kind: str,
    tile: Tile,
    *,
    dropout: bool,
    mask: str,
    packed: bool = False,
    sums: bool = False,
    shared: bool = False,
    scoring: bool = False,
    far: bool = False,
    **constants: Any,
) -> CompileCase:
    """A kernel of the attention family as a model calls it: heads of a whole number of 16 bytes, and so strides.

    name: family, kernel, variant; the tile is added. mask: none, bool or add. packed: sequences one after the other.
    sums: with those that a projection's bias gets. shared: query heads share heads of keys. scoring: with a window, a
    soft cap, ALiBi and sinks. far: rows need 64-bit offsets. constants: the kernel's own, but for those that follow
    from the other arguments.
    """
    element = "fp32" if kind == "tf32" else kind
    apart = (None,) * far
    known: dict[str, Any] = {
        "mask": {"none": None, "bool": "*u8", "add": f"*{element}"}[mask],
        "strides": (("i32:16",) * 3 + apart,) * list(kinds_of(kernel).values()).count("Pointer"),
        "sum_strides": ("i32:16",) * 2,
        "mask_strides": (*["i32:16"] * 3, 1, *apart),
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
        "GROUP": SHARED if shared else 1,
    }
    known |= {"offsets": None, "window": None, "softcap": None, "slopes": None, "sinks": None} if not scoring else {}
    known |= {} if dropout else {"seed": None}
    known["spans"] = (None, "*i64", "*i64") if packed else ("*i64", None, None)
    known |= {} if sums else {"dq_sums": None, "dk_sums": None, "dv_sums": None}
    known |= constants
    taken = {*kernel.arg_names, *(name for _, name, _ in each_of(kinds_of(kernel).items()))}
    given = {name: value for name, value in known.items() if name in taken}
    return kernel_case(kernel, name, kind, tile, given=given)


def head_case(
    kernel: Any, name: str, kind: str, tile: Tile, width: int, variant: Mapping[str, Any], **constants: Any
) -> CompileCase:
    """A case of a kernel that multiplies by heads of this size, a power of two, named by its variant: dropout, mask,
    packed, sums, shared, scoring and far of attention_case()."""
    constants |= {"D": width, "DV": width, "CAUSAL": True}
    return attention_case(kernel, f"{name}/{variant_name(**variant)}/D{width}", kind, tile, **variant, **constants)


def product_kinds(chip: Chip) -> tuple[str, ...]:
    """Return the types of products that compile differently: with matrix units float16 takes what bfloat16 takes."""
    if chip.capability >= 80:
        return ("bf16", "fp32", "tf32")
    return ("bf16", "fp32") if chip.matrix_units else ("bf16", "fp16", "fp32")


def distinct(cases: Iterable[CompileCase]) -> Iterator[CompileCase]:
    """The items without repetitions, in order."""
    yield from {(case.name, case.dtype): case for case in cases}.values()


def every_kind(chip: Chip) -> tuple[str, ...]:
    """Return all types of products, float16 as well where it takes what bfloat16 takes."""
    return tuple(dict.fromkeys((*product_kinds(chip), "fp16")))


def variant_name(
    *, dropout: bool, mask: str, packed: bool = False, sums: bool = False, shared: bool = False, scoring: bool = False,
    far: bool = False,
) -> str:  # fmt: skip
    """The variant in a case's name."""
    words = (
        "causal",
        "packed" if packed else "lengths",
        "dropout" * dropout,
        f"{mask}-mask" * (mask != "none"),
        "sums" * sums,
        "shared" * shared,
        "scoring" * scoring,
        "far" * far,
    )
    return "+".join(word for word in words if word)
