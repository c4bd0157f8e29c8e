"""Chips that can be emulated: the properties reported to Triton and torch.cuda."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """A product of a compute capability."""

    name: str
    """sm_90, ..."""
    product: str
    shared_memory: int
    """Maximum bytes of shared memory per program."""
    processors: int
    """Streaming multiprocessors."""
    memory: int
    """Bytes of device memory."""
    threads: int = 2048
    """Maximum resident threads per multiprocessor."""

    @property
    def number(self) -> int:
        """Compute capability as one number, 90 for sm_90."""
        return int(self.name[3:])

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(self.number, 10)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_60", "Tesla P100", 48 << 10, 56, 16 << 30),
        Chip("sm_70", "Tesla V100", 96 << 10, 80, 32 << 30),
        Chip("sm_75", "Tesla T4", 64 << 10, 40, 16 << 30, 1024),
        Chip("sm_80", "NVIDIA A100", 163 << 10, 108, 80 << 30),
        Chip("sm_86", "NVIDIA GeForce RTX 3090", 99 << 10, 82, 24 << 30, 1536),
        Chip("sm_89", "NVIDIA GeForce RTX 4090", 99 << 10, 128, 24 << 30, 1536),
        Chip("sm_90", "NVIDIA H100", 227 << 10, 132, 80 << 30),
        Chip("sm_100", "NVIDIA B200", 227 << 10, 148, 180 << 30),
        Chip("sm_120", "NVIDIA GeForce RTX 5090", 99 << 10, 170, 32 << 30, 1536),
    )
}
"""By name. Source: NVIDIA, "CUDA C++ Programming Guide", table of technical specifications per compute capability."""
