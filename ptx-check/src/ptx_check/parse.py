"""Parser from PTX text to a kernel's instructions, basic blocks and Python source lines.

Covers the part of PTX's grammar that Triton emits, inline assembly included: one entry, registers and labels,
statements that end with a semicolon. Basic blocks end at a branch or before a label; statement order is kept.
Source: NVIDIA, "PTX ISA", chapters 4 (syntax) and 11 (directives).
"""

import functools
import re
from dataclasses import dataclass, field
from typing import Any

from ptx_check.calls import as_instructions
from ptx_check.faults import Location, Unsupported
from ptx_check.functions import Functions, up_to_its_brace

_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s.*?(\w+)(?:\[(\d+)\])?\s*[,)\n]")
MAP = "map64"
"""Type of a tensor map passed by value; here the 64 bits of its address."""
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)[^/]*(?://\s*(.*))?")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+);")
_LOCAL = re.compile(r"\.local\s+\.align\s+\d+\s+\.b8\s+__local_depot\d+\[(\d+)\]")
_TABLE = re.compile(r"^\.global\s+\.align\s+\d+\s+\.b8\s+([$\w]+)\[(\d+)\](?:\s*=\s*\{([^}]*)\})?;", re.MULTILINE)
_LABEL = re.compile(r"([$\w]+):(?!:)\s*")
_TARGETS = re.compile(r"([$\w]+):\s*\.branchtargets\s+([^;]*);")
_SPECIALISED = re.compile(r"\bbrx\.idx|\bbarrier\.sync|\bsetmaxnreg|\bbar\.sync\s+(?:\S+,|[1-9%])")
"""Instructions at which some warps wait independently of the others."""
_WAITING = ("bar.sync", "barrier.sync", "setmaxnreg")
"""Instructions that end a block in kernels whose warps wait independently."""
_PART = re.compile(r"(?:[^,{\[]|\{[^}]*\}|\[[^\]]*\])+")
_NESTED = re.compile(r"\[[^\]]*\{")
_GUARD = re.compile(r"@(!?)(%?\w+)\s+(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Register:
    name: str
    kind: str
    """pred, b16, b32 or b64."""


@dataclass(frozen=True, slots=True)
class Number:
    """An immediate: bits as a Python integer, which may be negative; `real` for 0f and 0d constants."""

    value: int
    real: str = ""
    """f32 or f64 if written as bits of one."""


@dataclass(frozen=True, slots=True)
class Vector:
    parts: tuple


@dataclass(frozen=True, slots=True)
class Address:
    base: object
    """Register, symbol, or number."""
    offset: int


@dataclass(frozen=True, slots=True)
class Name:
    """A label, a symbol, a special register (%tid.x) or _."""

    text: str


@functools.cache
def words_of(opcode: str) -> list[str]:
    """Words of an opcode; do not modify the list."""
    return opcode.split(".")


@dataclass(slots=True)
class Instruction:
    opcode: str
    operands: tuple
    guard: Register | None
    negated: bool
    location: Location
    index: int = 0

    flow: Any = field(default=None, compare=False, repr=False)
    """Analysis results of control.py."""

    @property
    def words(self) -> list[str]:
        return words_of(self.opcode)


@dataclass(slots=True)
class Block:
    """A basic block; labels name its start."""

    labels: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(slots=True)
class Kernel:
    name: str
    parameters: list[tuple[str, str]]
    """(name, type) of each; types such as u64, b32 and f32, or MAP."""
    blocks: list[Block]
    registers: dict[str, str]
    """pred, b16, b32 or b64, by name."""
    local: int = 0
    """Bytes of local memory per thread."""
    tables: dict[str, bytes] = field(default_factory=dict)
    """Constants in global memory."""
    specialised: bool = False
    """Whether some warps wait independently of the others."""
    maxnreg: int = 255
    """Registers per thread at entry."""


def parse(text: str) -> Kernel:
    """Parse the kernel of a PTX text. Raises Unsupported with the line."""
    entry = re.search(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)\s*.*?\{", text, re.DOTALL)
    if entry is None or not re.search(r"^\.target\s+\w+", text, re.MULTILINE):
        raise Unsupported("this is no PTX of one kernel: .target or .visible .entry is missing")
    body = as_instructions(up_to_its_brace(text[entry.end() :]))
    functions = Functions(text, sum(int(size) for size in _LOCAL.findall(body)))
    body = functions.written_out(body)
    parameters = [(name, _whole(kind, count)) for kind, name, count in _PARAMETER.findall(entry[2] + "\n")]
    reader = _Reader(entry[1], dict(_FILE.findall(text)), 1 + text[: entry.end()].count("\n"))
    reader.tables = {label: re.findall(r"[$\w]+", labels) for label, labels in _TARGETS.findall(body)}
    reader.targets = set(re.findall(r"\bbra(?:\.uni)?\s+([$\w]+)", body)).union(*reader.tables.values())
    reader.specialised = _SPECIALISED.search(body) is not None
    reader.read(body)
    blocks = [block for block in reader.blocks if block.instructions or block.labels]
    for index, instruction in enumerate(i for block in blocks for i in block.instructions):
        instruction.index = index
    tables = {name: bytes(map(int, filter(None, numbers.split(",")))).ljust(int(size), b"\0")
              for name, size, numbers in _TABLE.findall(text)}  # fmt: skip
    most = re.search(r"\.maxnreg\s+(\d+)", text[entry.start() : entry.end()])
    return Kernel(
        entry[1], parameters, blocks, reader.registers, functions.local, tables, reader.specialised,
        int(most[1]) if most else 255,
    )  # fmt: skip


def _whole(kind: str, count: str) -> str:
    """Type of a parameter by kind or by size: a 16-bit number, or a tensor map."""
    if count not in ("", "2", "128"):
        raise Unsupported(f"a parameter of {count} bytes")
    return {"2": "b16", "128": MAP}.get(count, kind)


@dataclass(slots=True)
class _Scope:
    """Registers declared in a pair of braces."""

    prefix: str
    """Prefix that makes their names unique; empty for the kernel's own."""
    registers: dict[str, str] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)


class _Reader:
    def __init__(self, kernel: str, files: dict[str, str], line: int) -> None:
        self.kernel, self.files, self.line = kernel, files, line
        self.registers: dict[str, str] = {}
        """Kinds of the registers that are used, by name."""
        self.scopes = [_Scope("")]
        """Scopes of the kernel and of inline assembly, innermost last."""
        self.opened = 0
        self.targets: set[str] = set()
        self.tables: dict[str, list[str]] = {}
        """Target lists of brx.idx."""
        self.specialised = False
        self.blocks = [Block()]
        self.known: dict[str, object] = {}
        self.python = self.path = ""
        self.open = ""

    def read(self, body: str) -> None:
        for number, raw in enumerate(body.split("\n"), self.line):
            loc = _LOCATION.search(raw) if ".loc" in raw else None
            if loc:
                file, line, column, chain = loc.groups()
                if line != "0":  # 0: unknown to the compiler
                    self.path = self.files.get(file, "")
                    self.python = (chain or f"{self.files.get(file, file).rsplit('/', 1)[-1]}:{line}:{column}").strip()
                continue
            self.take(raw.split("//")[0].strip(), number)

    def take(self, text: str, number: int) -> None:
        """Parse the statements of one line; a statement may continue on the next."""
        if not text or text.startswith((".pragma", ".section", ".file", ".b8", ".local")):
            return
        text = f"{self.open} {text}".strip()
        self.open = ""
        while text:
            if text[0] in "{}":
                self.scope(text[0])
                text = text[1:].strip()
                continue
            label = _LABEL.match(text) if ":" in text else None
            if label:
                if label[1] in self.targets:  # others are for debuggers
                    self.label(self.named(label[1]))
                text = text[label.end() :]
                continue
            statement, separator, rest = text.partition(";")
            if not separator:
                self.open = text
                return
            self.statement(statement.strip(), number)
            text = rest.strip()

    def scope(self, brace: str) -> None:
        if brace == "{":
            self.opened += 1
            self.scopes.append(_Scope(f"scope{self.opened}_"))
        elif len(self.scopes) > 1:
            self.scopes.pop()

    def named(self, label: str) -> str:
        """Unique name of a label: labels of inline assembly are local to their braces; the compiler's begin with $."""
        return label if label.startswith("$") else self.scopes[-1].prefix + label

    def label(self, name: str) -> None:
        if self.blocks[-1].instructions:
            self.blocks.append(Block())
        self.blocks[-1].labels.append(name)

    def statement(self, text: str, number: int) -> None:
        declared = _REGISTERS.match(text + ";") if text.startswith(".reg") else None
        if declared:
            return self.declare(*declared.groups())
        if text.startswith(".branchtargets"):
            return None
        location = Location(self.kernel, number, self.python, self.path)
        guard, negated = None, False
        guarded = _GUARD.match(text) if text.startswith("@") else None
        if guarded:
            negated, text = guarded[1] == "!", guarded[3]
            guard = self.operand(guarded[2], location)
        opcode, _, rest = text.replace("\t", " ").partition(" ")
        if opcode.startswith("bra"):
            rest = self.named(rest.strip())
        operands = tuple(self.operand(part, location) for part in _split(rest))
        if opcode == "brx.idx":
            operands = (operands[0], *map(Name, self.tables[operands[1].text]))
        block = self.blocks[-1]
        block.instructions.append(Instruction(opcode, operands, guard, negated, location))
        waits = self.specialised and opcode.startswith(_WAITING)
        if waits or opcode.split(".")[0] in ("bra", "brx", "ret", "exit", "trap"):
            self.blocks.append(Block())
        return None

    def declare(self, kind: str, names: str) -> None:
        if kind != "pred":  # 8-bit values occupy a 16-bit register
            width = int(re.sub(r"\D", "", kind.removesuffix("x2"))) * (2 if kind.endswith("x2") else 1)
            kind = f"b{max(16, width)}"
        scope = self.scopes[-1]
        for name in names.split(","):
            family = re.match(r"(%?\w+)<\d+>", name.strip())
            if family:
                scope.families[family[1]] = kind
            else:
                scope.registers[name.strip()] = kind

    def register(self, name: str) -> Register | None:
        """Resolve a register name, innermost scope first."""
        for scope in reversed(self.scopes):
            kind = scope.registers.get(name) or scope.families.get(name.rstrip("0123456789"))
            if kind:
                unique = scope.prefix + name.replace("%", "") if scope.prefix else name
                self.registers[unique] = kind
                return Register(unique, kind)
        return None

    def operand(self, text: str, location: Location) -> Any:
        text = text.strip()
        if text.startswith("{"):
            return Vector(tuple(self.operand(part, location) for part in _split(text[1:-1])))
        if text.startswith("[") and "{" in text:  # a tensor map and coordinates
            return Vector(tuple(self.operand(part, location) for part in _split(text[1:-1])))
        if text.startswith("["):
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            place = Number(int(base)) if base.isdigit() else self.register(base) or Name(base)
            return Address(place, int(offset, 0) if offset else 0)
        if "|" in text:
            return Vector(tuple(self.operand(part, location) for part in text.split("|")))
        parsed = self.known.get(text) if len(self.scopes) == 1 else self.simple(text, location)
        if parsed is None:
            parsed = self.known[text] = self.simple(text, location)
        return parsed

    def simple(self, text: str, location: Location) -> object:
        known = self.register(text)
        if known is not None:
            return known
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return Number(int(text[2:], 16), "f32")
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return Number(int(text[2:], 16), "f64")
        if re.match(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$", text):
            return Number(int(text.rstrip("U"), 0))
        if re.match(r"[%$\w.]+$", text):
            return Name(text)
        raise Unsupported(f"operand {text!r} is not understood", location)


def _split(text: str) -> list[str]:
    """Split at commas outside of braces."""
    if not _NESTED.search(text):
        return [part for part in _PART.findall(text) if part.strip()]
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        if letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]
