"""Parser for cubins: instructions, constants, parameter layout, size of local memory.

A cubin is an ELF file. Its .nv.info sections contain attributes (format, number, size or value, payload), whose names
cuobjdump --dump-elf prints.
"""

import functools
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptx_check.faults import Unsupported
from ptx_check.ledger import sass

_PARAMETERS, _PARAMETER, _STACK = 0x0A, 0x17, 0x12
_SIZED = 4
"""Format code of attributes with a payload of variable size."""


@dataclass(frozen=True)
class Cubin:
    """A kernel's machine code."""

    name: str
    text: str
    """nvdisasm's text."""
    first: int
    """Offset of the parameters in the constant bank."""
    parameters: tuple[tuple[int, int], ...]
    """Offset (from `first`) and size of each parameter."""
    stack: int
    """Bytes of local memory per thread."""
    tables: dict[int, bytes]
    """Other constant banks: branch tables."""


_FLAGS = ("-lineinfo", "-v", "--regAllocOptLevel=2")
"""Assembler options of Triton 3.7.1; the last one changes the code of some kernels."""


@functools.lru_cache(maxsize=256)
def assembled(ptx: str, chip: str, ptxas: str) -> bytes:
    """Assemble PTX with Triton's options and the ptxas at a path. Raises Unsupported if ptxas rejects it."""
    architecture = chip + "a" * (int(chip[3:]) >= 90)
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        words = [ptxas, *_FLAGS, f"--gpu-name={architecture}", str(source), "-o", str(made)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unsupported(f"{ptxas} refuses the PTX for {chip}: {done.stderr.strip()[-300:]}")
        return made.read_bytes()


@functools.lru_cache(maxsize=256)
def read(image: bytes) -> Cubin:
    """Parse a cubin. Raises ValueError unless it contains exactly one kernel."""
    if image[:4] != b"\x7fELF":
        raise ValueError("no cubin: it does not begin as an ELF file")
    sections = _sections(image)
    names = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(names) != 1:
        raise ValueError(f"a cubin of {len(names)} kernels, not of one")
    name = names[0]
    first, parameters, stack = 0, {}, 0
    for part in (".nv.info", f".nv.info.{name}"):
        for number, payload in _attributes(sections.get(part, b"")):
            if number == _PARAMETERS:
                first = struct.unpack_from("<IHH", payload)[1]
            elif number == _PARAMETER:
                _, ordinal, offset, word = struct.unpack("<IHHI", payload)
                parameters[ordinal] = offset, word >> 18
            elif number == _STACK:
                stack = max(stack, struct.unpack("<II", payload)[1])
    banks = {int(bank[1]): part for part in sections if (bank := re.match(r"\.nv\.constant([1-9]\d*)", part))}
    tables = {number: _linked(sections, part) for number, part in banks.items()}
    found = tuple(parameters[ordinal] for ordinal in sorted(parameters))
    return Cubin(name, sass.disassemble(image), first, found, stack, tables)


def _sections(image: bytes) -> dict[str, bytes]:
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", image, start + size * number) for number in range(count)]
    strings = heads[names][4]

    def called(head) -> str:
        begin = strings + head[0]
        return image[begin : image.index(b"\0", begin)].decode()

    return {called(head): image[head[4] : head[4] + head[5]] for head in heads if head[1] != 8}


def _attributes(data: bytes):
    place = 0
    while place + 4 <= len(data):
        form, number, size = struct.unpack_from("<BBH", data, place)
        place += 4
        if form == _SIZED:
            yield number, data[place : place + size]
            place += size


def _linked(sections: dict[str, bytes], name: str) -> bytes:
    """A constant bank with relocations applied, for code at address 0."""
    made = bytearray(sections[name])
    entries = sections.get(f".rela{name}", b"")
    for place in range(0, len(entries), 24):
        offset, _, added = struct.unpack_from("<QQq", entries, place)
        (old,) = struct.unpack_from("<I", made, offset)
        struct.pack_into("<I", made, offset, (old + added) & 0xFFFFFFFF)
    return bytes(made)


def constants(cubin: Cubin, values: list[bytes], block: tuple[int, int, int], grid: tuple[int, int, int]) -> np.ndarray:
    """Constant bank 0 as the driver fills it for a launch on sm_90."""
    size = max([cubin.first, *(cubin.first + place + width for place, width in cubin.parameters)])
    bank = np.zeros(-(-size // 8) * 8 + 64, np.uint8)

    def put(place: int, data: bytes) -> None:
        bank[place : place + len(data)] = np.frombuffer(data, np.uint8)

    put(0, struct.pack("<6I", *block, *grid))
    put(STACK_POINTER, struct.pack("<I", stack_of(cubin)))
    put(WINDOW, struct.pack("<Q", GENERIC))
    for (place, width), value in zip(cubin.parameters, values, strict=True):
        if len(value) != width:
            raise ValueError(f"a parameter of {len(value)} bytes, where the cubin takes {width}")
        put(cubin.first + place, value)
    return bank


STACK_POINTER, WINDOW = 0x28, 0x198
"""Offsets in bank 0 of the stack pointer (end of local memory) and of the generic address of the parameters."""
GENERIC = 0x7F00_0000_0000


def stack_of(cubin: Cubin) -> int:
    return -(-cubin.stack // 16) * 16
