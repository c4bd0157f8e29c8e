"""The machine code of a launch in place of its PTX, or beside it."""

import torch
from torch import Tensor

from ptx_check.faults import Fault, Location, Unsupported
from ptx_check.machine_code.cubin import assembled
from ptx_check.machine_code.launch import Launch

CHIPS = ("sm_90",)
GRAINS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-17}
"""Of a tensor's largest number what two roundings of it may differ by, by the coarsest type of a launch's tensors."""
TF32 = 2.0**-9


class MachineCode:
    """How launches are executed: by which assembler's machine code, and whether the PTX is executed too."""

    def __init__(self, chip: str, ptxas: str | None, *, compare: bool) -> None:
        if chip not in CHIPS:
            raise ValueError(f"executed({chip!r}, machine_code=...): machine code of {', '.join(CHIPS)} alone is known")
        self.chip, self.ptxas, self.compare = chip, ptxas, compare
        self.rewrite = lambda image: image
        self.differences: list[tuple[str, float, float]] = []
        """Of each comparison the kernel, the largest difference and the largest number."""

    def execute(self, launch, values: list[bytes], tensors: list[Tensor]) -> list[Fault]:
        """launch: of the PTX, before it has run. values: its arguments as the kernel's parameters hold them."""
        if launch.cluster > 1:
            raise Unsupported("machine code of programs that several processors share")
        image = self.rewrite(assembled(launch.code.text, self.chip, self.ptxas))
        programs = None if not launch.left_out else len(launch.numbers)
        registers = launch.facts.maxnreg
        run = Launch(
            image, launch.grid, launch.threads, launch.shared, values, launch.known, programs, registers=registers
        )
        if not self.compare:
            return run.execute()
        before = [buffer.bytes.copy() for buffer in launch.known]
        faults = launch.execute()
        wanted = [tensor.clone() for tensor in tensors]
        for buffer, old in zip(launch.known, before):
            buffer.bytes[:] = old
        return faults + run.execute() + self.differing(launch, run.name, tensors, wanted)

    def differing(self, launch, kernel: str, tensors: list[Tensor], wanted: list[Tensor]) -> list[Fault]:
        """One fault where results differ by more than both may be rounded."""
        dtypes = {tensor.dtype for tensor in tensors}
        grain = next((GRAINS[d] for d in (torch.bfloat16, torch.float16) if d in dtypes), GRAINS[torch.float32])
        if grain < TF32 and ".tf32" in launch.code.text:
            grain = TF32
        worst, size = 0.0, 0.0
        for position, (found, true) in enumerate(zip(tensors, wanted)):
            if not found.is_floating_point():
                wrong = found != true
                difference, largest, allowed = wrong, 0.0, 0.0
            else:
                x, y = found.double(), true.double()
                alike = (x == y) | (x.isnan() & y.isnan())
                difference = (x - y).abs().nan_to_num(torch.inf, torch.inf).masked_fill(alike, 0.0)
                largest = y[y.isfinite()].abs().max().item() if y.isfinite().any() else 0.0
                allowed = grain * largest
                wrong = difference > allowed
            if wrong.any():
                text = f"{int(wrong.sum())} of {found.numel()} elements of tensor {position} are not what the PTX computes: "
                text += f"the largest difference is {float(difference.max()):.3g}, of numbers up to {largest:.3g}"
                return [Fault("assembler", text, Location(kernel, 0, "machine code"))]
            if found.is_floating_point() and found.numel() and float(difference.max()) > worst:
                worst, size = float(difference.max()), largest
        self.differences.append((kernel, worst, size))
        return []
