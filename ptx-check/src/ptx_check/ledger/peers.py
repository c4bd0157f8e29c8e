"""Counts the cubins in a shared library of CUDA code by the same rules as Triton's kernels.

A CUDA library has an ELF image per chip and source file. Uncompressed images are found by the ELF magic number and
machine 190 (CUDA); their length follows from their program and section tables. The text sections of an image have the
mangled names of the kernels, template arguments included.
"""

import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ptx_check.ledger import count, sass, units
from ptx_check.ledger.count import Count

_MAGIC = b"\x7fELF\x02\x01"
_CUDA = 190
_UNREADABLE = ("sm_60", "sm_70")
"""Chips whose machine code nvdisasm does not read."""


@dataclass(frozen=True, slots=True)
class Image:
    """A cubin in a shared library."""

    chip: str
    code: bytes

    def kernels(self) -> list[str]:
        """Mangled names of its kernels."""
        texts = [name for name in _sections(self.code) if name.startswith(".text.")]
        return [name.removeprefix(".text.") for name in texts]


@dataclass(frozen=True, slots=True)
class Peer:
    """A kernel of a shared library, counted."""

    chip: str
    name: str
    """Demangled, with template arguments."""
    registers: int | None
    """Per thread; None if cuobjdump does not report them."""
    spill: int | None
    """Bytes of local memory per thread; None if cuobjdump does not report them."""
    warps: int
    """Per program, from the template arguments of the name; 4 if it has none."""
    count: Count

    @property
    def title(self) -> str:
        """The name without parameters, return type and cutlass::."""
        return re.sub(r"^void |cutlass::|\(.*$", "", self.name)


def images(library: Path) -> Iterator[Image]:
    """Yield the uncompressed cubins of a library."""
    data = library.read_bytes()
    at = data.find(_MAGIC)
    while at >= 0:
        length = 4
        if struct.unpack_from("<H", data, at + 18)[0] == _CUDA:
            length = _length(data, at)
            flags = struct.unpack_from("<I", data, at + 48)[0]
            yield Image(f"sm_{_capability(flags)}", data[at : at + length])
        at = data.find(_MAGIC, at + max(length, 4))


def _capability(flags: int) -> int:
    """Return the compute capability in an image's ELF flags: the lowest byte, or the second one from newer tools."""
    low, second = flags & 0xFF, flags >> 8 & 0xFF
    return low if f"sm_{low}" in units.RATES else second


def _length(data: bytes, at: int) -> int:
    """Return the size of an image in bytes: the end of its program or section table, whichever is last."""
    programs, sections = struct.unpack_from("<QQ", data, at + 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", data, at + 54)
    return max(programs + program_size * program_count, sections + section_size * section_count)


def _sections(image: bytes) -> list[str]:
    table = struct.unpack_from("<Q", image, 40)[0]
    size, number, names = struct.unpack_from("<HHH", image, 58)
    strings = struct.unpack_from("<Q", image, table + names * size + 24)[0]
    starts = [strings + struct.unpack_from("<I", image, table + index * size)[0] for index in range(number)]
    return [image[start : image.index(b"\0", start)].decode() for start in starts]


def peers(library: Path, wanted: re.Pattern[str]) -> Iterator[Peer]:
    """Yield the kernels of a library whose demangled name matches `wanted` anywhere.

    Raises ValueError if the library has no uncompressed cubin.
    """
    found = False
    for image in images(library):
        if image.chip in _UNREADABLE:
            continue
        found = True
        kernels = image.kernels()
        readable = dict(zip(kernels, _readable(kernels)))
        if image.chip in units.RATES and any(wanted.search(name) for name in readable.values()):
            usage = sass.resource_usage(image.code)
            for function in sass.parse(sass.disassemble(image.code)):
                name = readable.get(function.name, function.name)
                if wanted.search(name):
                    counted = count.count(function, image.chip, _warps(name))
                    registers, spill, _ = usage.get(function.name, (None, None, None))
                    yield Peer(image.chip, name, registers, spill, _warps(name), counted)
    if not found:
        raise ValueError(
            f"{library} holds no cubin of sm_75 or newer that is not compressed: --peer reads shared libraries of CUDA "
            "code"
        )


def _readable(names: list[str]) -> list[str]:
    """Demangle C++ names; returns them unchanged if c++filt is not installed."""
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return names
    return done.stdout.splitlines()


def _warps(name: str) -> int:
    """Return the warps of a kernel from FlashAttention's traits (head dim, rows, columns, warps); 4 without traits."""
    traits = re.search(r"kernel_traits<(\d+), (\d+), (\d+), (\d+)", name)
    return int(traits[4]) if traits else 4


def elements(name: str) -> float | None:
    """Return the scores per thread of a FlashAttention tile, from its template arguments; None for other kernels."""
    traits = re.search(r"kernel_traits<(\d+), (\d+), (\d+), (\d+)", name)
    if traits is None:
        return None
    _, rows, columns, warps = map(int, traits.groups())
    loading = 4 if "compute_attn_ws" in name else 0  # FlashAttention-3's first warp group only loads
    return rows * columns / (32 * (warps - loading))
