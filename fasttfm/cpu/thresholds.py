"""Every threshold that decides how a CPU computes: its value, what it bounds, and where that was measured.

`fasttfm tune --device cpu` measures LEAST anew, for a processor and a number of threads, and keeps the result in the
user's cache (kernels/choice_cache.py). FIXED stays: a search's bits depend on it, and they must be the same in a
worker, in a server and beside any other sentence, or no user's machine could tell better.
"""

import functools
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fasttfm.kernels import choice_cache
from fasttfm.kernels.choice_cache import Answer, System
from fasttfm.machine import processor, version

_EPYC = "two cores of an AMD EPYC with AVX-512"
_AVX2 = "two cores of an AMD EPYC with AVX2 alone"
_XEON = "two cores of an Intel Xeon with AMX"
NEVER = 1 << 62
"""More elements than a tensor has: a pass that is never taken."""


@dataclass(frozen=True, slots=True)
class Threshold:
    value: Any
    bounds: str
    """What it is the bound of."""
    measured: str = ""
    """Where; empty for what was chosen without a measurement."""
    decides_search: bool = False
    """Whether the last bits of a search depend on it."""


_PASS = "elements from which on the pass is taken: below, it is hardly worth a call, and never worth compiling"
LEAST = {
    "keep_mask": Threshold(1 << 15, _PASS, _XEON),
    "softmax": Threshold(1 << 15, _PASS, _XEON),
    "softmax_gradient": Threshold(1 << 15, _PASS, _XEON),
    "gelu_tanh": Threshold(1 << 15, _PASS, _XEON),
    "gelu_tanh_gradient": Threshold(1 << 15, _PASS, _XEON),
    "residual_layer_norm": Threshold(1 << 15, _PASS, _XEON),
    "residual_layer_norm_gradient": Threshold(1 << 15, _PASS, _XEON),
    "residual_layer_norm_without_dropout": Threshold(
        1 << 15, _PASS + "; on an AMD EPYC beside other work about as fast as PyTorch's route in float32", _XEON
    ),
    "embedding_gradient": Threshold(1 << 15, _PASS, _AVX2),
    "cross_entropy": Threshold(1 << 15, _PASS, _AVX2),
    "cross_entropy_gradient": Threshold(1 << 15, _PASS, _AVX2),
}
"""Of the passes of training_passes.py, against PyTorch's route. More than two threads were measured nowhere."""

FIXED = {
    "threads_alone": Threshold(
        2, "threads of PyTorch up to which passes are taken where they run on one, for want of a library with teams",
        _XEON,
    ),
    "packed_weight": Threshold(
        1 << 15, "elements of a weight from which on it is laid out anew: below, the call costs more than it saves",
        _EPYC, decides_search=True,
    ),
    "packed_rows": Threshold(
        4, "rows that oneDNN's float32 product is filled up to: (8000, 512), one core, 1.0 ms for 4 and 1.3 for 1",
        _EPYC, decides_search=True,
    ),
    "panels": Threshold(
        ("AVX2",), "processors, as PyTorch calls what they have, with float32 products of our own: (2048, 512), two "
        "cores, 184 -> 123 us for a row, 537 -> 414 for 32, 1763 -> 1519 for 128", _AVX2, decides_search=True,
    ),
    "encoder_loop": Threshold(
        96, "rows of a sentence up to which an encoder attends in a loop of our own: one sentence of 8 heads of 64, "
        "146 -> 18 us with 16 rows, 247 -> 176 with 64, 434 -> 714 with 128", _AVX2, decides_search=True,
    ),
    "attention_loop": Threshold(
        1 << 15, "numbers of queries from which on attention outside a search is a loop of our own, in float32, on the "
        "processors of panels", _AVX2,
    ),
    "added_norm": Threshold(
        1 << 20, "numbers from which on a pre-norm residual without dropout and its LayerNorm are one operator in "
        "float32 while gradients are kept: below, and for post-norm, torch's own two take less: forward and backward "
        "2.1 against 2.6 ms with (1024, 512), 18.9 against 16.6 with (8192, 512)", _AVX2,
    ),
    "row_counts": Threshold(
        (1, 2, 4, 8, 16, 32, 40, 64, 96, 128, 192, 256), "row counts that products may have; which of them sum alike "
        "is found out", decides_search=True,
    ),
    "large_row_counts": Threshold(
        (384, 512, 640, 768, 896, 1024), "the same, for the rows of an encoder: products joined take longer than one",
        decides_search=True,
    ),
    "step_keys_float32": Threshold(
        1 << 18, "numbers in the keys up to which torch's kernel is taken for a step's attention: 64 -> 18 us for 4 "
        "rows of 8 heads and 14 keys, 56 -> 26 for one row of 4 queries and 27 keys", _EPYC, decides_search=True,
    ),
    "step_keys_bfloat16": Threshold(1 << 16, "the same, in bfloat16", _EPYC, decides_search=True),
    "softmax_row": Threshold(
        16, "floats in the widest register: a shorter row falls to a loop in PyTorch that is ten times slower than a "
        "padded row", _EPYC, decides_search=True,
    ),
    "softmax_padded": Threshold(4096, "numbers from which on padding shorter rows pays", _EPYC, decides_search=True),
    "fused_queries": Threshold(
        16, "queries from which on torch's fused kernel is taken in float32: forward and backward 1.3 and 1.1 times as "
        "fast at 100 keys, 4.3 and 2.2 times at 1,024 under a triangle; below 64 keys forward is hardly faster, and "
        "backward takes half as long (`python -m benchmarks kernels`)", _EPYC, decides_search=True,
    ),
    "fused_keys": Threshold(16, "keys from which on it is taken", _EPYC, decides_search=True),
    "loss_block": Threshold(
        1 << 19, "logits that a loss works on in float32 at a time: 2 MiB, the second-level caches of two cores"
    ),
    "loss_chunk": Threshold(1 << 22, "logits that exist at a time: 8 MiB in half precision"),
    "largest_block": Threshold(
        64, "numbers of a block of which the maximum is taken first: (128, 37,000) float32, k = 8, one core, 1.7 ms "
        "instead of topk's 5.9", _EPYC, decides_search=True,
    ),
    "joining_share": Threshold(
        4, "a quarter of the budget must be free before sentences join a search: an encoder is quicker with several",
        decides_search=True,
    ),
    "workers_work": Threshold(
        5e11, "source tokens times parameters times beam from which on processes are started: a core takes 5 s for so "
        "much, and starting them half of that", _XEON,
    ),
}  # fmt: skip


def fixed(name: str) -> Any:
    """A value of FIXED."""
    return FIXED[name].value


_forced: dict[str, int] = {}


def least(name: str) -> int:
    """From how many elements on a pass is taken, with as many threads as PyTorch has now."""
    if name in _forced:
        return _forced[name]
    return _tuned(torch.get_num_threads()).get(name, LEAST[name].value)


@contextmanager
def forced(values: Mapping[str, int]) -> Iterator[None]:
    """Inside, in the whole process, these stand in place of what is in force."""
    before = dict(_forced)
    _forced.update(values)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


# --------------------------------------------------------------------------------------------------------- what is kept


def system(threads: int) -> System:
    """Name the machine that a measurement holds for."""
    versions = {name: version(name) or "unknown" for name in ("fasttfm", "torch", "numba")}
    name = f"{processor() or platform.machine()}, {threads} threads"
    return System(name, platform.machine(), torch.backends.cpu.get_cpu_capability(), versions)


def as_answer(name: str, elements: int, microseconds: float, of_torch: float) -> Answer:
    """An answer as the cache keeps it; of_torch: what PyTorch's route took of as many elements in the same run."""
    return Answer(f"cpu.{name}", (), elements, microseconds, of_torch)


def tuned(threads: int) -> dict[str, int]:
    """Return what is kept of LEAST for so many threads. ValueError for a file that is damaged."""
    kept = {}
    for each in choice_cache.read(system(threads)):
        name = each.choice.removeprefix("cpu.")
        if name not in LEAST or type(each.answer) is not int or each.answer < 0:
            raise ValueError(f"{each.choice} {each.answer} is not a number of elements from which a pass is taken")
        kept[name] = each.answer
    return kept


@functools.cache
def _tuned(threads: int) -> dict[str, int]:
    remedy = "what ships is in force; run `fasttfm tune --device cpu` to measure again"
    key = system(threads)
    try:
        kept = tuned(threads)
    except ValueError as error:
        warnings.warn(f"{key.file} is damaged: {error}; {remedy}", RuntimeWarning, stacklevel=3)
        return {}
    if not kept and (old := key.others()):
        warnings.warn(f"{old[-1]} was measured with another driver or version: {remedy}", RuntimeWarning, stacklevel=3)
    return kept


def forget() -> None:
    """The next pass reads what is kept anew."""
    _tuned.cache_clear()
