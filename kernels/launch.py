"""Host helpers of a launch: the chip of a device, the precision of matrix products, the interpreter switch."""

from __future__ import annotations

import functools
import os

import torch

from fasttfm.kernels import choice_cache
from fasttfm.kernels.chip import INTERPRETER, Chip, named


@functools.cache
def interpreted() -> bool:
    """Return whether kernels run on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1 at its import)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def ceil_div(n: int, d: int) -> int:
    """Return n / d rounded up. triton.cdiv takes 4 us on the host, as long as the rest of a launch's preparation."""
    return -(-n // d)


def power_of_two(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def _chip_of_device(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name, shared = properties.gcnArchName.split(":")[0], 65536
    else:
        name = f"sm_{properties.major * 10 + properties.minor}"
        shared = getattr(properties, "shared_memory_per_block_optin", 49152)
    described = named(name, shared, properties.multi_processor_count)
    choice_cache.load(torch.device("cuda", index), described)
    return described


def chip(device: torch.device) -> Chip:
    """Return the Chip of a device. The first call per device queries the driver and loads its tuned choices."""
    if device.type != "cuda":
        return INTERPRETER
    return _chip_of_device(device.index if device.index is not None else torch.cuda.current_device())


_KINDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def product_kind(dtype: torch.dtype, chip: Chip) -> str:
    """Return the kind of matrix products of this dtype on a chip: fp32, tf32, fp16 or bf16.

    float32 becomes tf32 where the chip supports it and torch.backends.cuda.matmul.fp32_precision (or
    torch.set_float32_matmul_precision) allows it.
    """
    if dtype != torch.float32:
        return _KINDS[dtype]
    tf32 = chip.capability >= 80 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "fp32"


def precision(kind: str) -> str:
    """Return the PRECISION constant for products of this kind: tf32, ieee, or upcast (to float32, because the
    interpreter multiplies bfloat16 wrongly)."""
    if kind == "tf32":
        return "tf32"
    return "upcast" if kind == "bf16" and interpreted() else "ieee"
