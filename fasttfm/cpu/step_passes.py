"""Fused operations between the matrix products of a decoding step on a CPU, compiled by numba.

PyTorch needs several calls for each and writes intermediates to memory. Each row is computed independently, so its
result is the same in any batch. Sums are float32 for all dtypes. bfloat16 and float16 are passed as uint16 and int16,
which tells them apart. numba is optional (usable()); loops are compiled on first use and cached on disk.

Cost: attention reads the keys and values of the visible positions once, 2 * 2 * R * L * d bytes in bfloat16; a norm
reads two rows and writes two.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PANELS: tuple[str, ...] = ("AVX2", "AVX512")
"""CPU capabilities, by PyTorch's names, with our own float32 products and attention: (2048, 512) on two cores of an AMD
EPYC with AVX2, 184 -> 123 us for one row, 537 -> 414 for 32, 1763 -> 1519 for 128; on one core of an EPYC with AVX-512,
72 -> 53, 601 -> 586 and 2632 -> 2452. The last bits of a search depend on it."""
_VIEWS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""dtypes of takes() -> the dtypes of their arrays."""


@functools.cache
def usable() -> bool:
    """Return whether numba is installed and works; warn if it is installed and does not."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        loops()
    except Exception as error:  # this Python, NumPy or processor is not supported, or no folder for the cache is found
        warnings.warn(
            f"numba is installed but does not work, and PyTorch computes several times slower instead: {error} (if it "
            "finds no folder for its cache, set NUMBA_CACHE_DIR to one that can be written)",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def uses_panels() -> bool:
    """Return whether float32 products of frozen weights use panels.py on this machine."""
    return torch.backends.cpu.get_cpu_capability() in PANELS and usable()


def takes(x: Tensor, head_size: int = 1) -> bool:
    """Return whether the compiled loops support tensors like x."""
    return x.device.type == "cpu" and x.dtype in _VIEWS and head_size > 0 and usable()


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8.quantize_rows(): uint8 (M, K) and scales (M,) float32 of x (M, K)."""
    quantized, scales = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(x.shape[0], dtype=torch.float32)
    loops().quantize_rows(team(), array(x), quantized.numpy(), scales.numpy())
    return quantized, scales


def likeliest(logits: Tensor, k: int, forbid: Callable[[Tensor], None]) -> tuple[Tensor, Tensor]:
    """The k largest log-probabilities of each row of logits (R, V) in descending order, float32, and their ids; (R, k).

    forbid(logits) sets some to -inf in place after the rows have been summed: the others keep their probabilities.
    """
    search_loops = loops("search_loops")
    rows = logits.shape[0]
    sums = logits.new_empty(rows, dtype=torch.float32)
    search_loops.log_sum_exp(team(), array(logits), sums.numpy())
    forbid(logits)
    values, ids = (logits.new_empty(rows, k, dtype=dtype) for dtype in (torch.float32, torch.int64))
    search_loops.largest_of_rows(team(), array(logits), sums.numpy(), values.numpy(), ids.numpy())
    return values, ids


def array(x: Tensor) -> Any:
    """x as a NumPy array for the loops, sharing its memory."""
    return x.detach().view(_VIEWS.get(x.dtype, x.dtype)).numpy()


@functools.cache
def loops(module: str = "step_loops") -> Any:
    """A module of compiled loops, which imports numba."""
    return importlib.import_module(f"fasttfm.cpu.{module}")


def team() -> tuple[int, int, int]:
    """The threads for a loop, see thread_team.team()."""
    from fasttfm.cpu import thread_team

    return thread_team.team()
