"""The machine code of launches in place of their PTX, or beside it."""

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptx_check.faults import Fault, Location, Unsupported
from ptx_check.ledger import sass
from ptx_check.machine_code.cubin import assembled
from ptx_check.machine_code.launch import Launch

CHIPS = ("sm_90",)
GRAINS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-17}
"""Of a tensor's largest number what two roundings of it may differ by, by the coarsest type of a launch's tensors."""
_TF32 = 2.0**-9


def version(ptxas: str) -> str:
    """What an assembler calls itself, as 12.8.93; unknown where it does not say."""
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    return match[1] if match else "unknown"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one launch under one assembler, held against its PTX."""

    kernel: str
    ptxas: str
    faults: tuple[Fault, ...]
    difference: float
    """The largest of all tensors, of numbers up to `largest`."""
    largest: float


class MachineCode:
    """How launches are executed: by which assemblers' machine code, and whether beside the PTX."""

    def __init__(self, chip: str, ptxas: str | Sequence[str] | None, *, compare: bool) -> None:
        if chip not in CHIPS:
            raise ValueError(f"executed({chip!r}, machine_code=...): choose {', '.join(CHIPS)}: others are not known")
        every = [str(sass.tool("ptxas"))] if ptxas is None else [ptxas] if isinstance(ptxas, str) else list(ptxas)
        if len(every) != 1 and not compare:
            raise ValueError(f'executed(ptxas=...) of {len(every)} assemblers needs machine_code="compare"')
        self.chip, self.assemblers, self.compare = chip, every, compare
        self.rewrite: Callable[[bytes], bytes] = lambda image: image
        """What becomes of a cubin before it runs: for mutations."""
        self.outcomes: list[Outcome] = []

    def execute(self, launch: Any, values: list[bytes], tensors: list[Tensor]) -> list[Fault]:
        """launch: of the PTX, before it has run. values: its arguments as the kernel's parameters hold them."""
        if launch.cluster > 1:
            raise Unsupported("machine code of programs that several processors share")
        if not self.compare:
            return self.run(launch, values, self.assemblers[0])
        before = [buffer.bytes.copy() for buffer in launch.known]
        faults = launch.execute()
        wanted = [tensor.clone() for tensor in tensors]
        after = [buffer.bytes.copy() for buffer in launch.known]
        first = len(self.outcomes)
        for ptxas in self.assemblers:
            for buffer, old in zip(launch.known, before):
                buffer.bytes[:] = old
            self.outcomes.append(self.held(launch, values, ptxas, tensors, wanted))
        for buffer, new in zip(launch.known, after):
            buffer.bytes[:] = new
        return faults + self.told(self.outcomes[first:])

    def told(self, outcomes: list[Outcome]) -> list[Fault]:
        """Faults of the launch's machine code."""
        return [fault for outcome in outcomes for fault in outcome.faults]

    def run(self, launch: Any, values: list[bytes], ptxas: str) -> list[Fault]:
        image = self.rewrite(assembled(launch.code.text, self.chip, ptxas))
        return Launch(
            image, launch.grid, launch.threads, launch.shared, values, launch.known,
            len(launch.numbers) if launch.left_out else None, registers=launch.facts.maxnreg,
        ).execute()  # fmt: skip

    def held(self, launch: Any, values: list[bytes], ptxas: str, tensors: list[Tensor], wanted: list[Tensor]) -> Outcome:
        """Runs it under one assembler."""
        faults = self.run(launch, values, ptxas)
        allowed = _grain(launch.code.text, tensors)
        worst = 0.0, 0.0
        for position, (found, true) in enumerate(zip(tensors, wanted)):
            difference, largest = _difference(found, true)
            wrong = difference > (allowed * largest if found.is_floating_point() else 0.0)
            most = float(difference.max()) if difference.numel() else 0.0
            worst = max(worst, (most, largest))
            if wrong.any():
                text = f"{int(wrong.sum()):,} of {found.numel():,} elements of tensor {position} are not what the PTX "
                text += f"computes: the largest difference is {most:.3g}, of numbers up to {largest:.3g}"
                where = Location(launch.facts.name, 0, f"machine code by ptxas {version(ptxas)}")
                faults.append(Fault("assembler", text, where))
                break
        return Outcome(launch.facts.name, ptxas, tuple(faults), *worst)


def _grain(ptx: str, tensors: list[Tensor]) -> float:
    dtypes = {tensor.dtype for tensor in tensors}
    grain = max((GRAINS[dtype] for dtype in dtypes if dtype in GRAINS), default=0.0)
    return max(grain, _TF32) if ".tf32" in ptx else grain


def _difference(found: Tensor, true: Tensor) -> tuple[Tensor, float]:
    """By how much elements differ, and the largest finite number."""
    x, y = found.double(), true.double()
    alike = (found == true) | (x.isnan() & y.isnan())
    difference = (x - y).abs().nan_to_num(torch.inf, torch.inf).masked_fill(alike, 0.0)
    finite = y[y.isfinite()]
    return difference, finite.abs().max().item() if finite.numel() else 0.0
