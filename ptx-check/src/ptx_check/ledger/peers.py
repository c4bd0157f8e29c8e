"""Kernels of others: the cubins inside a shared library, read by the rule that Triton's are counted by.

A CUDA library holds an ELF image for each chip and file of kernels. Those that are not compressed are found by their
magic number, and are NVIDIA's by machine 190; their length follows from their table of sections. An image's text
sections are named after their kernels, templates' arguments included.
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


@dataclass(frozen=True, slots=True)
class Image:
    """A cubin inside a library."""

    chip: str
    code: bytes

    def kernels(self) -> list[str]:
        """Its kernels, as the linker names them."""
        texts = [name for name in _sections(self.code) if name.startswith(".text.")]
        return [name.removeprefix(".text.") for name in texts]


@dataclass(frozen=True, slots=True)
class Peer:
    """A kernel of a library."""

    chip: str
    name: str
    """Readable, with the arguments of its template."""
    registers: int | None
    spill: int | None
    """Bytes of local memory a thread; like registers None where cuobjdump cannot tell."""
    warps: int
    """By the kernel's own launch bounds; 4 where it names none."""
    count: Count

    @property
    def title(self) -> str:
        """The name without its parameters and what all of its kind share."""
        return re.sub(r"^void |cutlass::|\(.*$", "", self.name)


def images(library: Path) -> Iterator[Image]:
    """The cubins of a library that are not compressed."""
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
    """The chip in an image's flags: the lowest byte, the second one in images of newer tools."""
    low, second = flags & 0xFF, flags >> 8 & 0xFF
    return low if f"sm_{low}" in units.RATES else second


def _length(data: bytes, at: int) -> int:
    """Bytes of an image: up to the end of the table that stands last."""
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
    """The kernels of a library whose readable name has a match of `wanted`.

    Raises ValueError when the library has no cubin that can be read.
    """
    found = False
    for image in images(library):
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
        raise ValueError(f"{library} holds no cubin that is not compressed: --peer reads shared libraries of CUDA code")


def _readable(names: list[str]) -> list[str]:
    """The names without C++'s mangling, where c++filt is installed."""
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return names
    return done.stdout.splitlines()


def _warps(name: str) -> int:
    """The warps of a kernel: FlashAttention's traits name head size, rows, columns and warps; else 4."""
    traits = re.search(r"kernel_traits<(\d+), (\d+), (\d+), (\d+)", name)
    return int(traits[4]) if traits else 4


def elements(name: str) -> float | None:
    """Score elements a thread of one of FlashAttention's tiles, by the arguments of its template; None elsewhere."""
    traits = re.search(r"kernel_traits<(\d+), (\d+), (\d+), (\d+)", name)
    if traits is None:
        return None
    _, rows, columns, warps = map(int, traits.groups())
    loading = 4 if "compute_attn_ws" in name else 0  # FlashAttention-3's first warp group only loads
    return rows * columns / (32 * (warps - loading))
