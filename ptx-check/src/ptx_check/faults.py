"""Fault reports: kinds of fault, and their location in PTX and Python."""

from dataclasses import dataclass

KINDS = {
    "bounds": "an access outside of every tensor of the launch, or of the program's shared memory",
    "alignment": "a vector access at an address that its width does not divide",
    "divergence": "a barrier, shuffle or matrix instruction that not all threads reach together",
    "deadlock": "threads wait for what can no longer come: at a barrier, at an mbarrier, or for registers",
    "race": "two threads of a program touch one place, one of them writing, with no barrier in between",
    "programs": "two programs touch one place, one of them writing",
    "unwritten": "memory or a register that nobody wrote, or a copy that was not waited for, is used",
    "fence": "a matrix product with no wgmma.fence or fence.proxy.async between it and what it takes",
    "value": "threads of one instruction store different values at one place",
    "assembler": "machine code that computes something else than the PTX that it was made of",
    "order": "machine code whose results depend on when products and copies are complete, or on which warp goes first",
    "assertion": "tl.device_assert: what it asks for does not hold",
    "product": "a product in a layout deeper than itself, which the compiler multiplies wrongly",
}

NOTES = {
    "redundant": "reads that no barrier orders before a store, by threads that hold copies of what its thread has read",
    "fenced": "fragments of a product that are computed behind its wgmma.fence: the assembler injects another there",
    "rounding": "threads of one instruction store numbers at one place that differ in their last bits alone",
}
"""Kinds that are reported but are not faults."""


@dataclass(frozen=True, slots=True)
class Location:
    """Location of an instruction."""

    kernel: str
    line: int
    """Line in the PTX text, from 1; 0 if there is none."""
    python: str
    """file.py:line:column with inlining, from .loc."""
    file: str = ""
    """Path of that file."""

    def __str__(self) -> str:
        parts = (self.kernel, f"PTX line {self.line}" if self.line else "", self.python)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a kernel at one instruction, counted once for any number of threads."""

    kind: str
    message: str
    location: Location
    other: Location | None = None
    """The other access of a race."""

    def __str__(self) -> str:
        second = f"; the other access: {self.other}" if self.other else ""
        return f"{self.kind}: {self.message}, at {self.location}{second}"


class FaultyKernel(Exception):
    """Raised for a launch with faults."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))


class Unsupported(Exception):
    """Raised for unsupported PTX."""

    def __init__(self, message: str, location: Location | None = None) -> None:
        super().__init__(f"{message}, at {location}" if location else message)
