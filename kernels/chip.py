"""Facts of a device that tiles depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A device as far as tiles depend on it."""

    name: str
    """sm_90, gfx942, ...; interpreter for CPU tensors."""
    capability: int
    """Compute capability as one number, 90 for sm_90; 0 for AMD and the interpreter."""
    shared_memory: int
    """Bytes of shared memory that one program can have."""
    processors: int
    """Streaming multiprocessors or compute units."""
    matrix_units: bool
    """Whether tl.dot of half-precision tiles is issued to matrix units (Triton does so from sm_80 and on CDNA)."""

    @property
    def warp(self) -> int:
        """Threads of a warp, which AMD calls a wave."""
        return 64 if self.name.startswith("gfx9") else 32


def named(name: str, shared_memory: int, processors: int) -> Chip:
    """The Chip of this name, sm_90 or gfx942, whose abilities follow from it."""
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
        named("sm_70", 96 << 10, 80),  # V100: it has tensor cores, Triton does not use them
        named("sm_75", 64 << 10, 40),  # T4, likewise
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
"""The chips that every kernel must compile for, as launch.chip() would describe one product of each."""
