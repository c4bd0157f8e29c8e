"""Abilities of a chip, the tile that a kernel takes on it, and the interpreter switch."""

from __future__ import annotations

import functools
import os

import torch

from fasttfm.kernels import choice_cache
from fasttfm.kernels.chip import INTERPRETER, Chip, named


@functools.cache
def interpreted() -> bool:
    """True when Triton kernels run on CPU tensors through Triton's interpreter (TRITON_INTERPRET=1), as it decides once
    for all when they are imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def ceil_div(n: int, d: int) -> int:
    """n / d rounded up; triton.cdiv takes 4 us on the host for it, as long as the rest of a launch's preparation."""
    return -(-n // d)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def _chip_of_device(index: int) -> Chip:
    described = _described(index)
    choice_cache.load(torch.device("cuda", index), described)
    return described


def _described(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    processors = properties.multi_processor_count
    if torch.version.hip:
        return named(properties.gcnArchName.split(":")[0], 65536, processors)
    shared = getattr(properties, "shared_memory_per_block_optin", 49152)
    return named(f"sm_{properties.major * 10 + properties.minor}", shared, processors)


def chip(device: torch.device) -> Chip:
    """The chip that a tensor's device is; asks the driver, and loads what was tuned for it, once per device."""
    if device.type != "cuda":
        return INTERPRETER
    return _chip_of_device(device.index if device.index is not None else torch.cuda.current_device())


_KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def product_kind(dtype: torch.dtype, chip: Chip) -> str:
    """fp32, tf32, fp16 or bf16: how a matrix product of such tensors is computed on a chip.

    float32 becomes tf32 where the chip has it and torch is told so: torch.backends.cuda.matmul.fp32_precision, or
    torch.set_float32_matmul_precision.
    """
    if dtype != torch.float32:
        return _KINDS[dtype]
    tf32 = chip.capability >= 80 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "fp32"


def precision(kind: str) -> str:
    """The precision of tl.dot for products of this kind: tf32, ieee, or upcast: the interpreter multiplies bfloat16
    wrongly, so that its operands become float32."""
    if kind == "tf32":
        return "tf32"
    return "upcast" if kind == "bf16" and interpreted() else "ieee"
