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
