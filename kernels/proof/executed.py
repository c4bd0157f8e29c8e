"""Runs fasttfm's operators with their kernels' PTX executed on a CPU by the separate package ptx_check (ptx-check/).

with executed("sm_90") as machine:
    F.attention(query, key, value)      # CPU tensors, the tiles of an H100
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fasttfm.kernels import launch
from fasttfm.kernels.chip import CHIPS, Chip
from fasttfm.kernels.jit import Kernel
from fasttfm.kernels.proof.ledger import ptx_check


@contextlib.contextmanager
def executed(chip: str, **options: Any) -> Iterator[ptx_check.Machine]:
    """ptx_check.executed() in which fasttfm's operators run their Triton kernels on CPU tensors, with the chip's
    tiles."""
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(ptx_check.executed(chip, cuda=False, **options))
        stack.callback(take_for_device(CHIPS[chip]))
        stack.callback(_kernels_for_the_cpu())
        yield machine


def _kernels_for_the_cpu() -> Callable[[], None]:
    """Makes operators run their Triton kernels on CPU tensors. Returns an undo function."""
    backends = sys.modules.get("fasttfm.functional.backends")
    if backends is None:
        return lambda: None

    def use_triton(tensor: torch.Tensor, choice: str | None = None) -> bool:
        return (backends.current if choice is None else choice) != "torch"

    return replace_everywhere("use_triton", backends.use_triton, use_triton)


def take_for_device(product: Chip) -> Callable[[], None]:
    """Makes all imported kernel files choose tiles for a chip, with empty launch caches. Returns an undo function."""
    undo_chip = replace_everywhere("chip", launch.chip, lambda device: product)
    modules = [module for name, module in sys.modules.items() if name.startswith("fasttfm.")]
    launched = [(k, k._launched) for module in modules for k in vars(module).values() if isinstance(k, Kernel)]
    for kernel, _ in launched:
        kernel._launched = {}

    def undo() -> None:
        undo_chip()
        for kernel, cache in launched:
            kernel._launched = cache

    return undo


def replace_everywhere(name: str, old: Any, new: Any) -> Callable[[], None]:
    """Replaces `old` by `new` under this name in every module of fasttfm. Returns an undo function."""
    for path, module in list(sys.modules.items()):
        if path.startswith("fasttfm.") and getattr(module, name, None) is old:
            vars(module)[name] = new

    def undo() -> None:
        for module in list(sys.modules.values()):  # including modules imported since
            if getattr(module, name, None) is new:
                vars(module)[name] = old

    return undo
