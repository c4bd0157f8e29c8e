"""The host side that all attention kernels share: what is passed on, and how a tensor's strides get there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from fasttfm.kernels.attention_tile import VARYING
from fasttfm.kernels.choices import choice
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.launch import Chip, chip, interpreted, product_kind
from fasttfm.kernels.philox import dropout_arguments

MAX_WIDTH = 256
"""Largest head size of queries, keys and values."""


SHORT = 128
"""Most keys of the short-row route."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of scores and how it is computed."""

    rows: int
    """Queries."""
    columns: int
    """Keys."""
    warps: int
    stages: int


class Packed(NamedTuple):
    """Sequences one after the other on both sides."""

    query_starts: torch.Tensor
    """(B + 1,) int32 or int64: where each begins among the queries, and the end of the last."""
    key_starts: torch.Tensor
    """Likewise among the keys."""
    max_query: int
    """No sequence has more queries."""
    max_key: int
    """No sequence has more keys."""

    @property
    def batch(self) -> int:
        return self.query_starts.shape[0] - 1


@dataclass(slots=True)
class Call:
    """One call of attention, as its kernels take it."""

    chip: Chip
    kind: str
    """fp32, tf32, fp16 or bf16."""
    planes: int
    """Batch times heads."""
    queries: int
    keys: int
    arguments: tuple
    """key_lengths, query_starts, key_starts, mask, seed and so on to S, which follow the tensors in every kernel."""
    mask_strides: tuple
    constants: dict

    @property
    def size_class(self) -> tuple:
        """What tiles depend on: chip, kind, the larger head size in classes from 64 on, and how many of mask and
        dropout take registers as well."""
        width = max(64, self.constants["BLOCK_D"], self.constants["BLOCK_DV"])
        return self.chip, self.kind, width, sum(x is not None for x in self.arguments[3:5])


def key_class(keys: int) -> int:
    """The size class of rows with that many keys: the power of two from 16 to 2048 that holds them, else 4096."""
    return _power_of_two(keys, 2048)


def width_class(width: int) -> int:
    """The power of two from 16 to MAX_WIDTH that a head of this size is computed in, else twice MAX_WIDTH."""
    return _power_of_two(width, MAX_WIDTH)


def _power_of_two(size: int, most: int) -> int:
    power = 16
    while power < size and power <= most:  # comparisons alone, because size may be symbolic under torch.compile
        power *= 2
    return power


def fits_short(chip: Chip, kind: str, width: int, keys: int) -> bool:
    """Whether a program can hold all keys and values of a head, their gradients and its scores without spilling.

    width and keys as route() takes them.
    """
    widest, most = {"fp32": (64, 2048), "tf32": (64, 4096)}.get(kind, (128, 8192))  # head size; keys * head size
    if chip.capability == 120:
        most //= 2
    elif not chip.capability:
        most = min(most, 4096)
    elif not chip.matrix_units:
        most = 2048
    return keys <= SHORT and width <= widest and keys * max(64, width) <= most


def _routes(chip: Chip, kind: str, width: int, keys: int) -> list[str]:
    if width > MAX_WIDTH or spills(chip, kind, width):
        return ["softmax"]
    return ["short", "flash", "softmax"] if fits_short(chip, kind, width, keys) else ["flash", "softmax"]


@choice("attention.route", alternatives=_routes)
def route(chip: Chip, kind: str, width: int, keys: int) -> str:
    """short, flash or softmax: attention_short.py, attention.py, or masked_softmax.py between two cuBLAS products.

    kind as launch.product_kind() names it; width from width_class(); keys from key_class(). Where Triton has no matrix
    units to use, cuBLAS wins as soon as the products weigh more than the traffic: a chip of 15 TFLOP/s and 900 GB/s
    does 17 operations in the time of a byte, and a row of S keys needs about S / 2 of them a byte in half precision.
    Above 1,024 keys the scores would fill the memory; but wide heads in float32 proper spill, because Triton keeps
    their rows in registers. None of these limits has been measured yet.
    """
    if width > MAX_WIDTH:
        return "softmax"
    if fits_short(chip, kind, width, keys):
        return "short"
    if spills(chip, kind, width):
        return "softmax"
    if chip.capability and (not chip.matrix_units or kind == "fp32") and keys <= 1024:
        return "softmax"
    return "flash"


def spills(chip: Chip, kind: str, width: int) -> bool:
    """Whether the kernels for long rows spill, or exceed the shared memory, whatever their tile: float32 proper takes
    no matrix units, and Triton then keeps whole rows of both operands at hand."""
    return chip.capability > 0 and kind == "fp32" and width > (64 if chip.matrix_units else 128)


def unit(x: torch.Tensor) -> torch.Tensor:
    """x with neighbouring elements in its last dimension, copied where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def by_head(x: torch.Tensor, batch: int) -> torch.Tensor:
    """A packed (T, H, D) seen as (B, H, T, D): every sequence reads the same memory, from its own start on."""
    return unit(x).transpose(0, 1).unsqueeze(0).expand(batch, -1, -1, -1)


def strides(*tensors: torch.Tensor) -> list[int]:
    """Those of batch, head and row, one tensor after the other."""
    return [s for x in tensors for s in x.stride()[:3]]


def like_heads(x: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """An empty (B, H, L, width) whose memory is (B, L, H, width); x (B, H, L, ...)."""
    batch, heads, length = x.shape[:3]
    return x.new_empty(batch, length, heads, x.shape[3] if width is None else width).transpose(1, 2)


def mask_arguments(mask, shape):
    """The mask as kernels take it, its kind (none, bool, add), and its strides once broadcast to (B, H, L, S)."""
    if mask is None:
        return None, "none", (0, 0, 0, 0)
    mask = mask.expand(shape)
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), "bool", mask.stride()
    return mask, "add", mask.stride()


def prepare(
    query,
    key,
    value,
    *,
    key_lengths=None,
    mask=None,
    causal=False,
    causal_offset=0,
    dropout_p=0.0,
    scale=1.0,
    seed=None,
    stream=0,
    packed=None,
) -> Call:
    """Arguments as fasttfm.functional.attention's; query, key, value (B, H, ., .), through by_head() when packed."""
    batch, heads, queries, width = query.shape
    keys, value_width = value.shape[2:]
    if key_lengths is not None:
        key_lengths = key_lengths.contiguous()
    here = chip(query.device)
    kind = product_kind(query.dtype, here)
    mask, mask_kind, mask_strides = mask_arguments(mask, (batch, heads, queries, keys))
    query_starts = key_starts = None
    if packed is not None:
        query_starts, key_starts, queries, keys = packed
        query_starts, key_starts = query_starts.contiguous(), key_starts.contiguous()
    seed, threshold, keep_scale = dropout_arguments(dropout_p, seed)
    return Call(
        chip=here,
        kind=kind,
        planes=batch * heads,
        queries=queries,
        keys=keys,
        arguments=(
            key_lengths, query_starts, key_starts, mask, seed, stream, threshold, keep_scale, scale, causal_offset,
            heads, queries, keys,
        ),
        mask_strides=mask_strides,
        constants={
            "D": width,
            "DV": value_width,
            "BLOCK_D": width_class(width),
            "BLOCK_DV": width_class(value_width),
            "CAUSAL": causal,
            "MASK": mask_kind,
            "PRECISION": "tf32" if kind == "tf32" else "ieee",
            "UPCAST": interpreted() and kind == "bf16",
        },
    )  # fmt: skip


_TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "scores", "p", "kept", "dkept", "dscores")


def compile_case(kernel, name, kind, tile, constants, *, dropout=False, mask="none", sums=False) -> CompileCase:
    """A kernel of the attention family as a model calls it: heads of a whole number of 16 bytes, and so strides.

    name: family, kernel, variant; the tile is added. constants: the kernel's constexpr parameters, but for those that
    follow from the other arguments. sums: with those that a projection's bias gets.
    """
    element = "fp32" if kind == "tf32" else kind
    precision = "tf32" if kind == "tf32" else "ieee"
    constants = {
        "MASK": mask,
        "PRECISION": precision,
        "UPCAST": False,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
    } | constants
    arguments = {}
    for parameter in kernel.arg_names:
        if parameter in constants:
            value = constants[parameter]
        elif parameter in _TENSORS:
            value = f"*{element}"
        elif parameter in ("lse", "delta", "parts"):
            value = "*fp32"
        elif parameter == "key_lengths":
            value = "*i64"
        elif parameter in ("query_starts", "key_starts"):
            value = None
        elif parameter in ("dq_sums", "dk_sums", "dv_sums"):
            value = "*fp32" if sums else None
        elif parameter == "mask":
            value = {"none": None, "bool": "*u8", "add": f"*{element}"}[mask]
        elif parameter == "seed":
            value = "*i64" if dropout else None
        elif parameter in ("scale", "keep_scale", "factor"):
            value = "fp32"
        elif parameter in VARYING:
            value = "i32"
        else:
            value = 1 if parameter == "mask_s" else "i32:16"  # strides
        arguments[parameter] = value
    return CompileCase(
        kernel=kernel,
        name=f"{name}/{tile.rows}x{tile.columns}w{tile.warps}s{tile.stages}",
        dtype=kind,
        arguments=arguments,
        num_warps=tile.warps,
        num_stages=tile.stages,
        matrix_product="PRECISION" in kernel.arg_names,
    )


def head_constants(width: int, *, causal: bool = True) -> dict:
    """The constants of kernels that multiply by heads of this size, a power of two."""
    return {"D": width, "DV": width, "BLOCK_D": width, "BLOCK_DV": width, "CAUSAL": causal}


def product_kinds(chip: Chip) -> tuple[str, ...]:
    """What products are computed in; float16 takes what bfloat16 takes."""
    return ("bf16", "fp32", "tf32") if chip.capability >= 80 else ("bf16", "fp32")


def variant_name(*, dropout: bool, mask: str, sums: bool = False) -> str:
    """The variant in a case's name."""
    words = ("causal", "lengths", "dropout" * dropout, f"{mask}-mask" * (mask != "none"), "sums" * sums)
    return "+".join(word for word in words if word)
