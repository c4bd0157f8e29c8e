"""Device properties on which the choice of tiles depends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A kind of GPU, or the interpreter."""

    name: str
    """sm_90, gfx942, ...; interpreter for CPU tensors."""
    capability: int
    """Compute capability as one number, 90 for sm_90; 0 for AMD and the interpreter."""
    shared_memory: int
    """Bytes of shared memory available to one program."""
    processors: int
    """Streaming multiprocessors or compute units."""
    matrix_units: bool
    """Whether Triton issues half-precision tl.dot to matrix units (from sm_80 and on CDNA)."""

    @property
    def warp(self) -> int:
        """Threads per warp (AMD: wave)."""
        return 64 if self.name.startswith("gfx9") else 32


def named(name: str, shared_memory: int, processors: int) -> Chip:
    """Return the Chip of this name, such as sm_90 or gfx942, from which the other properties follow."""
    capability = int(name.removeprefix("sm_")) if name.startswith("sm_") else 0
    return Chip(
        name=name,
        capability=capability,
        shared_memory=shared_memory,
        processors=processors,
        matrix_units=capability >= 80 or name.startswith("gfx9"),
    )


INTERPRETER = Chip(name="interpreter", capability=0, shared_memory=1 << 30, processors=4, matrix_units=False)

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        named("sm_60", 48 << 10, 56),  # P100
        named("sm_70", 96 << 10, 80),  # V100: Triton does not use its tensor cores
        named("sm_75", 64 << 10, 40),  # T4: likewise
        named("sm_80", 163 << 10, 108),  # A100
        named("sm_86", 99 << 10, 82),  # RTX 3090
        named("sm_89", 99 << 10, 128),  # RTX 4090
        named("sm_90", 227 << 10, 132),  # H100, H200
        named("sm_100", 227 << 10, 148),  # B200
        named("sm_120", 99 << 10, 170),  # RTX 5090
        named("gfx90a", 64 << 10, 104),  # one die of an MI250
        named("gfx942", 64 << 10, 304),  # MI300X
        named("gfx950", 64 << 10, 256),  # MI355X
    )
}
"""The chips that every kernel must compile for, with the numbers of one product each, as launch.chip() gives them."""
