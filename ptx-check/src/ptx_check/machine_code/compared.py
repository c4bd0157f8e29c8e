"""Executes launches from machine code, instead of or compared with their PTX."""

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptx_check.faults import NOTES, Fault, Location, Unsupported
from ptx_check.ledger import sass
from ptx_check.machine_code.cubin import Cubin, assembled, read
from ptx_check.machine_code.launch import Launch

CHIPS = ("sm_90",)
GRAINS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-17}
"""Allowed difference relative to a tensor's largest number; the coarsest dtype among a launch's tensors decides."""
_TF32 = 2.0**-9


def version(ptxas: str) -> str:
    """Version of an assembler, such as 12.8.93; "unknown" if it prints none."""
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    return match[1] if match else "unknown"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one launch under one assembler, compared with its PTX."""

    kernel: str
    ptxas: str
    faults: tuple[Fault, ...]
    difference: float
    """Largest difference in any tensor."""
    largest: float
    """Largest number of the tensor with that difference."""


class MachineCode:
    """Executes launches from the machine code of one or more assemblers, instead of or compared with the PTX."""

    def __init__(self, chip: str, ptxas: str | Sequence[str] | None, *, compare: bool) -> None:
        if chip not in CHIPS:
            raise ValueError(f"executed({chip!r}, machine_code=...): choose {', '.join(CHIPS)}: others are not known")
        every = [str(sass.tool("ptxas"))] if ptxas is None else [ptxas] if isinstance(ptxas, str) else list(ptxas)
        if len(every) != 1 and not compare:
            raise ValueError(f'executed(ptxas=...) of {len(every)} assemblers needs machine_code="compare"')
        self.chip, self.assemblers, self.compare = chip, every, compare
        self.rewrite: Callable[[str], str] = lambda text: text
        """Rewrites nvdisasm's text before execution, for mutation tests."""
        self.outcomes: list[Outcome] = []
        self.made: list[tuple[Cubin, Outcome]] = []
        """Machine code of the current launch by the assemblers so far, and the outcomes."""

    def execute(self, launch: Any, values: list[bytes], tensors: list[Tensor]) -> list[Fault]:
        """Execute a launch, and return its faults.

        launch: PTX launch that has not run yet; if the PTX has faults, the machine code is not run. values: bytes of
        the kernel parameters. Memory holds the results of the PTX if both are executed.
        """
        if launch.cluster > 1:
            raise Unsupported("machine code of programs that several processors share")
        if not self.compare:
            return self.run(self.cubin(launch, self.assemblers[0]), launch, values)
        before = _memory(launch)
        faults = launch.execute()
        if any(fault.kind not in NOTES for fault in faults):
            return faults
        wanted = [tensor.clone() for tensor in tensors]
        after = _memory(launch)
        first, self.made = len(self.outcomes), []
        for ptxas in self.assemblers:
            _restore(before)
            self.outcomes.append(self.held(launch, values, ptxas, tensors, wanted))
        _restore(after)
        return faults + self.told(self.outcomes[first:])

    def told(self, outcomes: list[Outcome]) -> list[Fault]:
        """All faults of the outcomes."""
        return [fault for outcome in outcomes for fault in outcome.faults]

    def cubin(self, launch: Any, ptxas: str) -> Cubin:
        return read(assembled(launch.code.text, self.chip, ptxas))

    def run(self, of: Cubin, launch: Any, values: list[bytes]) -> list[Fault]:
        return Launch(
            replace(of, text=self.rewrite(of.text)), launch.grid, launch.threads, launch.shared, values, launch.known,
            len(launch.numbers) if launch.left_out else None, registers=launch.facts.maxnreg,
        ).execute()  # fmt: skip

    def held(
        self, launch: Any, values: list[bytes], ptxas: str, tensors: list[Tensor], wanted: list[Tensor]
    ) -> Outcome:
        """Run the machine code of one assembler and compare its results with `wanted`.

        If another assembler produced the same machine code and it passed, its outcome is returned.
        """
        of = self.cubin(launch, ptxas)
        for other, outcome in self.made:
            if other == of and not outcome.faults:
                return replace(outcome, ptxas=ptxas)
        faults = self.run(of, launch, values)
        allowed = _grain(launch.code.text, tensors)
        worst = 0.0, 0.0
        for position, (found, true) in enumerate(zip(tensors, wanted)):
            difference, largest = _difference(found, true)
            wrong = difference > allowed * largest if found.is_floating_point() else found != true
            most = float(difference.max()) if difference.numel() else 0.0
            worst = max(worst, (most, largest))
            if wrong.any():
                text = f"{int(wrong.sum()):,} of {found.numel():,} elements of tensor {position} are not what the PTX "
                text += f"computes: the largest difference is {most:.3g}, of numbers up to {largest:.3g}"
                where = Location(launch.facts.name, 0, f"machine code by ptxas {version(ptxas)}")
                faults.append(Fault("assembler", text, where))
                break
        outcome = Outcome(launch.facts.name, ptxas, tuple(faults), *worst)
        self.made.append((of, outcome))
        return outcome


def _memory(launch: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Arrays that a launch may write (bytes and marks of tensors), each with a copy."""
    written = [array for buffer in launch.known for array in (buffer.bytes, buffer.marks) if array is not None]
    return [(array, array.copy()) for array in written]


def _restore(memory: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Restore arrays from their copies."""
    for array, copy in memory:
        array[:] = copy


def _grain(ptx: str, tensors: list[Tensor]) -> float:
    dtypes = {tensor.dtype for tensor in tensors}
    grain = max((GRAINS[dtype] for dtype in dtypes if dtype in GRAINS), default=0.0)
    return max(grain, _TF32) if ".tf32" in ptx else grain


def _difference(found: Tensor, true: Tensor) -> tuple[Tensor, float]:
    """Differences of the elements, and the largest finite number of `true`."""
    x, y = found.double(), true.double()
    alike = (found == true) | (x.isnan() & y.isnan())
    difference = (x - y).abs().nan_to_num(torch.inf, torch.inf).masked_fill(alike, 0.0)
    finite = y[y.isfinite()]
    return difference, finite.abs().max().item() if finite.numel() else 0.0
