"""Instruction operands as Python expressions over numpy arrays, for translate.py."""

from collections.abc import Iterable, Sequence

import numpy as np

from ptx_check.allocations import POISON
from ptx_check.control import TYPE_OF, registers_of
from ptx_check.faults import Unsupported
from ptx_check.parse import MAP, Address, Instruction, Name, Number, Register, Vector
from ptx_check.undefined import FRESH

TYPES = {"p": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64}
TYPES |= {f"{sign}{bits}": getattr(np, f"{word}{bits}") for sign, word in (("u", "uint"), ("i", "int"))
          for bits in (8, 16, 32, 64)}  # fmt: skip
PARAMETER = 16
"""Distance between parameters in the address space of computed parameter addresses."""
_SPECIAL = {"%tid.x": "M.tid", "%ctaid.x": "M.ctaid[0]", "%ctaid.y": "M.ctaid[1]", "%ctaid.z": "M.ctaid[2]",
            "%nctaid.x": "M.nctaid[0]", "%nctaid.y": "M.nctaid[1]", "%nctaid.z": "M.nctaid[2]", "%laneid": "M.lane",
            "%ntid.x": "M.ntid", "%warpid": "M.warp", "%tid.y": "M.zero", "%tid.z": "M.zero",
            "%smid": "M.zero", "%cluster_ctarank": "(M.ctaid[0] % M.cluster)", "%cluster_nctarank": "M.cluster",
            "%clusterid.x": "(M.ctaid[0] // M.cluster)", "%clusterid.y": "M.ctaid[1]", "%clusterid.z": "M.ctaid[2]",
            "%nclusterid.x": "(M.nctaid[0] // M.cluster)", "%nclusterid.y": "M.nctaid[1]",
            "%nclusterid.z": "M.nctaid[2]"}  # fmt: skip
_CLOCKS = ("%clock", "%clock64", "%globaltimer")


class Operands:
    """Code generator for one block: its variables and the generated lines."""

    def __init__(self, number, block, crossing, labels, parameters, space, marked: frozenset[str] | None) -> None:
        self.number, self.block, self.crossing = number, block, crossing
        self.labels, self.parameters, self.space = labels, parameters, space
        self.may_have: set[str] | None = None if marked is None else set(marked)
        """Registers that may have marks; None: any."""
        self.marked = marked is None
        """Whether to generate lines that propagate marks."""
        self.points: dict[tuple[int, int], int] = {}
        """Load instruction -> line after which marks are propagated."""
        self.loads: dict[str, tuple[int, list[str]]] = {}
        """Variable -> position and text of the lines that fetch its register from other blocks."""
        self.body: list[str] = []
        self.kinds: dict[str, str] = {}
        """Register -> numpy type of its variable."""
        self.changed: dict[str, str] = {}

    def emit(self, line: str) -> None:
        self.body.append(line)

    def value(self, operand: object, kind: str, i: Instruction) -> str:
        """Expression for an operand as numpy type `kind`."""
        if isinstance(operand, Register):
            name = operand.name
            if name not in self.kinds:
                plain = TYPE_OF[operand.kind]
                lines = [f"{variable(name)} = S[{self.crossing[name]}]"]
                if operand.kind != "pred":  # unwritten registers have an arbitrary value
                    unknown = self.constant(Number(int(POISON[bits_of_kind(plain) // 8])), plain)
                    lines.append(f"if {variable(name)} is None: {variable(name)} = {unknown}")
                self.loads[variable(name)] = len(self.body), lines
                self.body += lines
                self.kinds[name] = plain
            return viewed(variable(name), self.kinds[name], kind)
        if isinstance(operand, Number):
            return self.constant(operand, kind)
        if isinstance(operand, Name):
            if operand.text in _SPECIAL:
                return viewed(_SPECIAL[operand.text], "u32", kind)
            if operand.text in _CLOCKS:
                return viewed("M.clock()", "u64", kind)
            if variable(operand.text) in self.space:
                return viewed(variable(operand.text), "u64", kind)
            if operand.text == "global_smem" or operand.text.startswith("__local_depot"):
                return self.constant(Number(0), kind)
            if operand.text in self.parameters:
                position, type_of = self.parameters[operand.text]
                if type_of == MAP:
                    return viewed(f"M.parameters[{position}]", "u64", kind)
                return self.constant(Number(PARAMETER * position), kind)
        if isinstance(operand, Vector) and len(operand.parts) == 2:
            narrow = "u16" if kind.endswith("32") else "u32"
            low, high = (self.value(part, narrow, i) for part in operand.parts)
            return viewed(f"pack({low}, {high})", f"u{kind[1:]}", kind)
        raise Unsupported(f"operand {operand} of {i.opcode} is not known", i.location)

    def values(self, operands: Iterable[object], kind: str, i: Instruction) -> str:
        """Expression for a tuple of operands."""
        return "(" + "".join(f"{self.value(operand, kind, i)}, " for operand in operands) + ")"

    def constant(self, number: Number, kind: str) -> str:
        return f"k_{kind}_{number.value & ((1 << 64) - 1):x}"

    def address(self, operand: Address, kind: str, i: Instruction) -> str:
        base = operand.base
        if isinstance(base, Name) and base.text != "global_smem" and variable(base.text) not in self.space:
            raise Unsupported(f"symbol {base.text} is not known", i.location)
        text = self.value(base, kind, i)
        return f"({text} + {self.constant(Number(operand.offset), kind)})" if operand.offset else text

    def guard(self, i: Instruction) -> str:
        if i.guard is None:
            return "None"
        return f"{'~' if i.negated else ''}{self.value(i.guard, 'p', i)}"

    def assign(self, target: object, text: str, kind: str, i: Instruction, *, kept: bool = False) -> None:
        """Emit target = text of type `kind`. kept: the text already applies the guard."""
        if isinstance(target, Name) and target.text == "_":
            return
        if not isinstance(target, Register):
            raise Unsupported(f"a result of {i.opcode} that is no register", i.location)
        plain = TYPE_OF[target.kind]
        if bits_of_kind(kind) != bits_of_kind(plain):
            text, kind = f"({text}).astype({plain})", plain
        if i.guard is not None and not kept:
            text = f"np.where({self.guard(i)}, {text}, {self.value(target, kind, i)})"
        self.emit(f"{variable(target.name)} = {text}")
        self.kinds[target.name] = kind
        if target.name in self.crossing:
            self.changed[target.name] = target.kind

    def assign_elements(self, targets: Iterable[object], kind: str, i: Instruction) -> None:
        """Assign the elements of v to the targets."""
        for position, target in enumerate(targets):
            self.assign(target, f"v[{position}]", kind, i)

    # -------------------------------------------------------------------------------------------------------- marks

    def marks(self, operand: object, kind: str) -> str:
        """Expression for the marks of an operand (undefined.py) as numpy type `kind`."""
        if isinstance(operand, Register):
            return f"U.mask({operand.name!r}, {kind})"
        if isinstance(operand, Vector) and len(operand.parts) == 2:
            narrow = "u16" if kind.endswith("32") else "u32"
            low, high = (self.marks(part, narrow) for part in operand.parts)
            return viewed(f"pack({low}, {high})", f"u{kind[1:]}", kind)
        return self.constant(Number(0), kind)

    def mark(self, target: object, sources: Iterable[object], text: str, kind: str, i: Instruction) -> None:
        """Set the marks (of type `kind`) of the result if it or a source has any."""
        if not self.marked or not isinstance(target, Register):
            return
        names = [r.name for source in sources for r in registers_of(source)]
        plain = TYPE_OF[target.kind]
        if bits_of_kind(kind) != bits_of_kind(plain):
            text = f"({text}).astype({plain})"
        elif kind != plain:
            text = f"({text}).view({plain})"
        self.follow([*names, target.name], f"U.put({target.name!r}, {text}, {self.guard(i)}, {tuple(names)})")

    def follow(self, names: Iterable[str], call: str) -> None:
        """Emit a call that runs if any of these registers has marks."""
        if self.marked:
            self.emit(f"if T and not T.keys().isdisjoint({tuple(dict.fromkeys(names))}): {call}")

    def use(self, operands: Iterable[object], what: str, i: Instruction) -> None:
        """Emit a check that the used registers have no marks."""
        if not self.marked:
            return
        names = tuple(dict.fromkeys(r.name for operand in operands for r in registers_of(operand)))
        if names:
            self.follow(names, f"U.used({i.index}, {names}, {self.guard(i)}, {what!r})")

    def point(self, i: Instruction, names: Iterable[str] = (FRESH,)) -> None:
        """Emit a switch to the mark-propagating version of the block if any of these has untracked marks."""
        key = (i.index, int((i.index, 0) in self.points))
        self.points[key] = len(self.body)
        if self.may_have is not None:
            call = f"return BLOCKS[{self.number}].rest({key}, M, S, m, locals())"
            self.emit(f"if T and U.here({tuple(names)}): {call}")

    def load_marks(self, targets: Iterable[object], size: str, kind: str, i: Instruction) -> None:
        """Set registers' marks from loaded elements of type `size`, read as `kind`."""
        self.point(i)
        if self.marked:
            self.put_loaded(targets, size, kind, i)

    def put_loaded(self, targets: Iterable[object], size: str, kind: str, i: Instruction) -> None:
        """Set registers' marks from the last load."""
        targets = list(targets)
        names = [t.name for t in targets if isinstance(t, Register)]
        lines = [f"w = U.fresh({len(targets)}, {size!r})"]
        for position, target in enumerate(targets):
            if not isinstance(target, Register):
                continue
            text, plain = viewed(f"w[{position}]", size, kind), TYPE_OF[target.kind]
            if bits_of_kind(kind) != bits_of_kind(plain):
                text = f"{text}.astype({plain})"
            elif kind != plain:
                text = f"{text}.view({plain})"
            lines.append(f"U.put({target.name!r}, {text}, {self.guard(i)}, ('',))")
        self.follow(["", *names], "; ".join(lines))


def parameters_of(parameters: list[tuple[str, str]], values: Sequence[int | float]) -> list[np.ndarray]:
    """Convert launch arguments to the bits that ld.param reads."""
    made = []
    for (_, kind), value in zip(parameters, values, strict=True):
        bits = int("".join(c for c in kind if c.isdigit()))
        if kind[0] == "f":
            real = np.full((1, 1), value, {16: np.float16, 32: np.float32, 64: np.float64}[bits])
            made.append(real.view({16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]))
        else:
            kept = int(value) & ((1 << bits) - 1)
            made.append(np.full((1, 1), kept, {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]))
    return made


def constant_of(name: str) -> np.ndarray:
    """Value of a named constant."""
    _, kind, digits = name.split("_")
    value = int(digits, 16)
    if kind == "p":
        return np.array([[value != 0]])
    bits = int(kind[1:])
    unsigned: np.ndarray = np.array([[value & ((1 << bits) - 1)]], dtype=TYPES[f"u{bits}"])
    return unsigned.view(TYPES[kind])


def bits_of_kind(kind: str) -> int:
    return 1 if kind == "p" else int(kind[1:])


def variable(name: str) -> str:
    return name.replace("%", "").replace("$", "_")


def viewed(text: str, kind: str, wanted: str) -> str:
    if kind == wanted:
        return text
    if bits_of_kind(kind) == bits_of_kind(wanted):
        return f"{text}.view({wanted})"
    return f"{text}.astype(u{bits_of_kind(wanted)})" + ("" if wanted[0] == "u" else f".view({wanted})")
