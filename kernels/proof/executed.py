"""fasttfm's operators with their kernels executed from PTX on a CPU, by ptx_check, a package of its own (ptx-check/).

with executed("sm_90") as machine:
    F.attention(query, key, value)      # CPU tensors, the tiles of an H100
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.ledger import ptx_check
from fasttfm.kernels.proof.stand_in import replace_everywhere, take_for_device


@contextlib.contextmanager
def executed(chip: str, **options: Any) -> Iterator[ptx_check.Machine]:
    """ptx_check.executed, inside of which fasttfm takes Triton kernels for CPU tensors too, with the chip's tiles."""
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(ptx_check.executed(chip, cuda=False, **options))
        stack.callback(take_for_device(CHIPS[chip]))
        stack.callback(_kernels_for_the_cpu())
        yield machine


def _kernels_for_the_cpu() -> Callable[[], None]:
    """Operators take their kernels for CPU tensors too, wherever they would on a device. Returns what undoes it."""
    backends = sys.modules.get("fasttfm.functional.backends")
    if backends is None:
        return lambda: None

    def use_triton(tensor: torch.Tensor, choice: str | None = None) -> bool:
        return (backends.chosen() if choice is None else choice) != "torch"

    return replace_everywhere("use_triton", backends.use_triton, use_triton)
