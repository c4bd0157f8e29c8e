"""A kernel's basic blocks as Python functions over numpy arrays: every instruction a line, every register a variable.

    def block_3(M, S, m):          M the running programs, S registers that cross blocks, m which threads are here
        r7 = r5 + r6
        ...
        return p2, 5, 4            where p2, to block 5, the others to block 4

A register is an array of shape (programs or 1, threads or 1): what depends on the thread's number alone is computed
once for all programs. Variables of one block are dropped after their last use, so that memory is used again while the
cache has it. What crosses blocks lies in S as unsigned bits, merged under m where some threads are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fasttfm.kernels.proof.ptx import arithmetic, rounding
from fasttfm.kernels.proof.ptx.faults import Unsupported
from fasttfm.kernels.proof.ptx.memory import ACCUMULATED, POISON
from fasttfm.kernels.proof.ptx.parse import Address, Block, Instruction, Kernel, Name, Number, Register, Vector

_NAMES = {"p": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64}
_NAMES |= {f"{sign}{bits}": getattr(np, f"{word}{bits}") for sign, word in (("u", "uint"), ("i", "int"))
           for bits in (8, 16, 32, 64)}  # fmt: skip
_PLAIN = {"pred": "p", "b16": "u16", "b32": "u32", "b64": "u64"}
_IGNORED = ("fence", "membar", "prefetch", "griddepcontrol")
_REFUSED = ("tcgen05", "mbarrier", "setmaxnreg", "elect", "mapa", "cluster", "barrier", "call")
PARAMETER = 16
"""Bytes from one parameter to the next, in the addresses that a kernel may compute of them."""
_SPACES = {"global": "memory", "shared": "shared"}
_LOAD_MODES = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "weak"}
_ATOMIC_MODES = {"global", "gpu", "cta", "sys", "cluster", "relaxed", "acquire", "release", "acq_rel", "noftz"}
_ATOMIC_TYPES = {"f16": "f16", "f32": "f32", "f64": "f64", "b32": "u32", "u32": "u32", "s32": "i32", "b64": "u64",
                 "u64": "u64", "s64": "i64"}  # fmt: skip
_SPECIAL = {"%tid.x": "M.tid", "%ctaid.x": "M.ctaid[0]", "%ctaid.y": "M.ctaid[1]", "%ctaid.z": "M.ctaid[2]",
            "%nctaid.x": "M.nctaid[0]", "%nctaid.y": "M.nctaid[1]", "%nctaid.z": "M.nctaid[2]", "%laneid": "M.lane",
            "%ntid.x": "M.ntid", "%warpid": "M.warp", "%tid.y": "M.zero", "%tid.z": "M.zero"}  # fmt: skip


def translate(kernel: Kernel) -> list:
    """A function for every block. Raises Unsupported for an opcode that is not known, with its line."""
    uses = [_uses(block) for block in kernel.blocks]
    crossing = {name: position for position, name in enumerate(sorted(set().union(*(u for u, _ in uses))))}
    labels = {label: number for number, block in enumerate(kernel.blocks) for label in block.labels}
    space: dict = {"np": np, **_NAMES, **{n: f for n, f in vars(rounding).items() if not n.startswith("_")}}
    parameters = {name: position for position, (name, _) in enumerate(kernel.parameters)}
    everything = [i for block in kernel.blocks for i in block.instructions]
    late = {r.name for i in everything if "mma_async" in i.opcode for r in registers_of(i.operands[0])}
    copies = [tuple(r.name for o in i.operands for r in registers_of(o)) for i in everything if i.words[0] == "mov"]
    while late and (earlier := {c[0] for c in copies if len(c) == 2 and c[1] in late} - late):
        late |= earlier
    read = {r.name for i in everything for o in i.operands[_first_source(i) :] for r in registers_of(o)}
    lines: list[str] = []
    for number, block in enumerate(kernel.blocks):
        lines += _Writer(number, block, crossing, labels, parameters, space, late, read).lines()
    exec(compile("\n".join(lines), f"<{kernel.name}>", "exec"), space)
    return [space[f"block_{number}"] for number in range(len(kernel.blocks))]


def registers_of(operand: object) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for part in operand.parts:
            yield from registers_of(part)
    elif isinstance(operand, Address) and isinstance(operand.base, Register):
        yield operand.base


def results_and_sources(i: Instruction) -> tuple[list[Register], list[Register]]:
    """What an instruction writes and what it reads; a guarded one keeps, so reads, what it may write."""
    first = _first_source(i)
    written = [r for o in i.operands[:first] for r in registers_of(o)]
    read = [r for o in i.operands[first:] for r in registers_of(o)]
    if i.opcode.startswith("wgmma"):
        read += written
        if "mma_async" not in i.opcode:
            written, read = [], []
    if i.guard:
        read += [i.guard, *written]
    return written, read


def _first_source(i: Instruction) -> int:
    """Where the operands that are read begin: behind the result, if there is one."""
    return 0 if i.words[0] in ("st", "bar", "cp", "stmatrix", "bra", "ret", "exit", "fence", "membar", "red") else 1


def _uses(block: Block) -> tuple[set[str], set[str]]:
    """Names that a block reads before it writes them, and names that it writes."""
    before: set[str] = set()
    defined: set[str] = set()
    for instruction in block.instructions:
        written, read = results_and_sources(instruction)
        before |= {r.name for r in read} - defined
        defined |= {r.name for r in written}
    return before, defined


class _Writer:
    def __init__(self, number, block, crossing, labels, parameters, space, late, read) -> None:
        self.number, self.block, self.crossing = number, block, crossing
        self.late, self.read = late, read
        """Registers that asynchronous products write, and those that some instruction reads."""
        self.labels, self.parameters, self.space = labels, parameters, space
        self.body: list[str] = []
        self.kinds: dict[str, str] = {}
        """Variables that hold a value, and its type."""
        self.changed: dict[str, str] = {}

    def lines(self) -> list[str]:
        last: dict[str, int] = {}
        for position, i in enumerate(self.block.instructions):
            for registers in results_and_sources(i):
                last.update({r.name: position for r in registers})
        end = f"return {self.number + 1}"
        for position, i in enumerate(self.block.instructions):
            base = i.opcode.split(".")[0]
            if base in ("bra", "ret", "exit"):
                end = self.leave(i, base)
                break
            self.instruction(i, base)
            dead = [n for n, p in last.items() if p == position and n in self.kinds and n not in self.changed]
            if dead:
                self.emit(" = ".join(_variable(n) for n in dead) + " = None")
        for name, kind in self.changed.items():
            where, plain = self.crossing[name], _PLAIN[kind]
            value = _viewed(_variable(name), self.kinds[name], plain)
            self.emit(f"S[{where}] = {value} if m is None or S[{where}] is None else np.where(m, {value}, S[{where}])")
        return [f"def block_{self.number}(M, S, m):", *(f"    {line}" for line in [*self.body, end])]

    def emit(self, line: str) -> None:
        self.body.append(line)

    def leave(self, i: Instruction, base: str) -> str:
        target = -1 if base != "bra" else self.labels[i.operands[0].text]
        if i.guard is None:
            return f"return {target}"
        taken = self.value(i.guard, "p", i)
        return f"return {'~' if i.negated else ''}{taken}, {target}, {self.number + 1}"

    # ------------------------------------------------------------------------------------------------- operands

    def value(self, operand: object, kind: str, i: Instruction) -> str:
        """An expression for an operand as numpy type `kind`."""
        if isinstance(operand, Register):
            name = operand.name
            if name not in self.kinds:
                plain = _PLAIN[operand.kind]
                self.emit(f"{_variable(name)} = S[{self.crossing[name]}]")
                if operand.kind != "pred":  # what was never written holds anything
                    unknown = self.constant(Number(int(POISON[_bits(plain) // 8])), plain)
                    self.emit(f"if {_variable(name)} is None: {_variable(name)} = {unknown}")
                self.kinds[name] = plain
            return _viewed(_variable(name), self.kinds[name], kind)
        if isinstance(operand, Number):
            return self.constant(operand, kind)
        if isinstance(operand, Name):
            if operand.text in _SPECIAL:
                return _viewed(_SPECIAL[operand.text], "u32", kind)
            if operand.text == "global_smem":
                return self.constant(Number(0), kind)
            if operand.text in self.parameters:
                return self.constant(Number(PARAMETER * self.parameters[operand.text]), kind)
        if isinstance(operand, Vector) and len(operand.parts) == 2:
            narrow = "u16" if kind.endswith("32") else "u32"
            low, high = (self.value(part, narrow, i) for part in operand.parts)
            return _viewed(f"pack({low}, {high})", f"u{kind[1:]}", kind)
        raise Unsupported(f"operand {operand} of {i.opcode} is not known", i.location)

    def values(self, operands: Iterable[object], kind: str, i: Instruction) -> str:
        """A tuple of such expressions."""
        return "(" + "".join(f"{self.value(operand, kind, i)}, " for operand in operands) + ")"

    def constant(self, number: Number, kind: str) -> str:
        bits = 8 if kind == "p" else int(kind[1:])
        if kind == "p":
            made = np.array([[number.value != 0]])
        else:
            unsigned: np.ndarray = np.array([[number.value & ((1 << bits) - 1)]], dtype=_NAMES[f"u{bits}"])
            made = unsigned.view(_NAMES[kind])
        name = f"k_{kind}_{number.value & ((1 << 64) - 1):x}"
        self.space[name] = made
        return name

    def address(self, operand: Address, kind: str, i: Instruction) -> str:
        base = operand.base
        if isinstance(base, Name) and base.text != "global_smem":
            raise Unsupported(f"symbol {base.text} is not known", i.location)
        text = self.value(base, kind, i)
        return f"({text} + {self.constant(Number(operand.offset), kind)})" if operand.offset else text

    def guard(self, i: Instruction) -> str:
        if i.guard is None:
            return "None"
        return f"{'~' if i.negated else ''}{self.value(i.guard, 'p', i)}"

    def assign(self, target: object, text: str, kind: str, i: Instruction, *, kept: bool = False) -> None:
        """target = text, of type `kind`; kept: the text has the guard's doing in it already."""
        if isinstance(target, Name) and target.text == "_":
            return
        if not isinstance(target, Register):
            raise Unsupported(f"a result of {i.opcode} that is no register", i.location)
        plain = _PLAIN[target.kind]
        if _bits(kind) != _bits(plain):
            text, kind = f"({text}).astype({plain})", plain
        if i.guard is not None and not kept:
            text = f"np.where({self.guard(i)}, {text}, {self.value(target, kind, i)})"
        self.emit(f"{_variable(target.name)} = {text}")
        self.kinds[target.name] = kind
        if target.name in self.crossing:
            self.changed[target.name] = target.kind

    def assign_elements(self, targets: Iterable[object], kind: str, i: Instruction) -> None:
        """The targets are the elements of v."""
        for position, target in enumerate(targets):
            self.assign(target, f"v[{position}]", kind, i)

    # --------------------------------------------------------------------------------------------- instructions

    def instruction(self, i: Instruction, base: str) -> None:
        if base in _REFUSED:
            raise Unsupported(f"opcode {i.opcode} is not executed by this machine", i.location)
        if base in _IGNORED:
            return
        if self.late and "mma_async" not in i.opcode:
            early = sorted({r.name for r in results_and_sources(i)[1]} & self.late)
            if base == "mov" and early:  # where loops end, the compiler copies sums that are on their way
                names = [r.name for o in i.operands for r in registers_of(o)]
                self.emit(f"if M.groups.open: M.groups.move({names!r})")
            elif early:
                self.emit(f"if M.groups.open: M.groups.check({i.index}, {early!r})")
        handler = getattr(self, f"_{base}", None)
        if handler is not None:
            handler(i)
            return
        self._computed(i)

    def _computed(self, i: Instruction) -> None:
        meant = arithmetic.known(i.opcode, i.location)
        target, *sources = i.operands
        if i.opcode.startswith("setp") and isinstance(target, Vector):
            return self._compared_pairs(i, meant, target.parts)
        if i.words[0] in ("min", "max") and i.words[-1] == "f32" and len(sources) == 3:
            meant = arithmetic.of_three(meant)
        if len(sources) != len(meant.operands):
            raise Unsupported(f"{i.opcode} with {len(sources)} sources", i.location)
        values = [self.value(source, kind, i) for source, kind in zip(sources, meant.operands)]
        self.assign(target, meant.expression.format(*values), meant.result, i)
        return None

    def _compared_pairs(self, i: Instruction, meant, targets) -> None:
        """setp of pairs of halves: a predicate for the lower ones and one for the upper ones."""
        if not i.words[-1].endswith("x2"):
            raise Unsupported(f"form of {i.opcode}", i.location)
        values = [self.value(source, "u32", i) for source in i.operands[1:]]
        for side, target in enumerate(targets):
            self.assign(target, meant.expression.format(*(f"halves({v})[{side}]" for v in values)), "p", i)

    def _mov(self, i: Instruction) -> None:
        target, source = i.operands
        if not isinstance(target, Vector):
            return self._computed(i)
        whole = "u" + i.opcode.split(".")[1][1:]
        if len(target.parts) == 4:
            part = int(whole[1:]) // 4
            self.emit(f"v = {self.value(source, whole, i)}")
            for position, destination in enumerate(target.parts):
                self.assign(destination, f"(v >> {whole}({position * part})).astype(u{part})", f"u{part}", i)
            return None
        half = f"u{int(whole[1:]) // 2}"
        self.emit(f"low, high = halves({self.value(source, whole, i)})")
        for part, text in zip(target.parts, ("low", "high"), strict=True):
            self.assign(part, text, half, i)
        return None

    def _ld(self, i: Instruction) -> None:
        space, kind, size, targets = self._access(i, i.operands[0])
        if space == "param":
            base = i.operands[1].base
            if isinstance(base, Name):
                text = f"M.parameters[{self.parameters[base.text]}]"
            else:
                text = f"M.parameter({self.address(i.operands[1], 'u64', i)})"
            self.assign(i.operands[0], f"{text}.astype(u{8 * size})", f"u{8 * size}", i)
            return
        address = self.address(i.operands[1], "u64" if space == "global" else "u32", i)
        kept = "None" if i.guard is None else self.values(targets, f"u{8 * size}", i)
        call = f"M.{_SPACES[space]}.load({i.index}, {address}, {self.guard(i)}, {size}, {len(targets)}, {kept})"
        self.emit(f"v = {call}")
        for position, target in enumerate(targets):
            self.assign(target, _viewed(f"v[{position}]", f"u{8 * size}", kind), kind, i, kept=True)

    def _st(self, i: Instruction) -> None:
        space, _, size, sources = self._access(i, i.operands[1])
        address = self.address(i.operands[0], "u64" if space == "global" else "u32", i)
        values = self.values(sources, f"u{8 * size}", i)
        self.emit(f"M.{_SPACES[space]}.store({i.index}, {address}, {self.guard(i)}, {size}, {values})")

    def _red(self, i: Instruction) -> None:
        self._accumulate(i, *i.operands)

    def _atom(self, i: Instruction) -> None:
        target, *sources = i.operands
        if any(r.name in self.read for r in registers_of(target)):
            raise Unsupported(f"opcode {i.opcode} whose result is used is not executed by this machine", i.location)
        self._accumulate(i, *sources)

    def _accumulate(self, i: Instruction, destination: Address, *values: object) -> None:
        words = [w for w in i.words[1:] if w not in _ATOMIC_MODES]
        known = len(words) == 2 and words[0] in ACCUMULATED and words[1] in _ATOMIC_TYPES
        if i.words[1] != "global" or len(values) != 1 or not known:
            raise Unsupported(f"opcode {i.opcode} is not executed by this machine", i.location)
        kind = _ATOMIC_TYPES[words[1]]
        value = self.value(values[0], f"u{_bits(kind)}" if kind != "f32" else "u32", i)
        address = self.address(destination, "u64", i)
        call = f"{i.index}, {address}, {self.guard(i)}, '{words[0]}', {kind}, {value}"
        self.emit(f"M.memory.accumulate({call})")

    def _access(self, i: Instruction, data: object) -> tuple[str, str, int, tuple]:
        """Of a load or store: address space, type, bytes an element, registers."""
        words = [w for w in i.words[1:] if not w.startswith(("L1::", "L2::")) and w not in _LOAD_MODES]
        space, kind = words[0].split("::")[0], arithmetic._TYPES.get(words[-1])
        count = int(words[1][1:]) if len(words) == 3 and words[1][0] == "v" else 1
        if space not in ("param", "global", "shared") or kind is None or len(words) != (3 if count > 1 else 2):
            raise Unsupported(f"opcode {i.opcode} is not known", i.location)
        registers = data.parts if isinstance(data, Vector) else (data,)
        if len(registers) != count or len(i.operands) != 2:
            raise Unsupported(f"operands of {i.opcode}", i.location)
        return space, kind, int(kind[1:]) // 8, registers

    def _shfl(self, i: Instruction) -> None:
        target, source, lane, clamp, _ = i.operands
        if isinstance(target, Vector) or i.words[1] != "sync" or not isinstance(clamp, Number):
            raise Unsupported(f"form of {i.opcode}", i.location)
        sources = f"{self.value(source, 'u32', i)}, {self.value(lane, 'u32', i)}, {clamp.value}"
        self.assign(target, f"M.shuffle({i.index}, '{i.words[2]}', {sources})", "u32", i)

    def _vote(self, i: Instruction) -> None:
        target, source, _ = i.operands
        mode = i.words[2]
        self.assign(target, f"M.vote({i.index}, '{mode}', {self.value(source, 'p', i)})",
                    "u32" if mode == "ballot" else "p", i)  # fmt: skip

    def _bar(self, i: Instruction) -> None:
        if i.opcode == "bar.warp.sync":
            self.emit(f"M.warp_barrier({i.index})")
        elif i.opcode == "bar.sync" and len(i.operands) == 1 and i.guard is None:
            self.emit(f"M.barrier({i.index}, {self.value(i.operands[0], 'u32', i)})")
        else:
            raise Unsupported(f"form of {i.opcode}", i.location)

    def _cp(self, i: Instruction) -> None:
        if i.opcode == "cp.async.commit_group":
            self.emit(f"M.copies.commit({i.index})")
        elif i.opcode == "cp.async.wait_group":
            self.emit(f"M.copies.wait({i.index}, {i.operands[0].value})")
        elif i.opcode == "cp.async.wait_all":
            self.emit(f"M.copies.commit({i.index})")
            self.emit(f"M.copies.wait({i.index}, 0)")
        elif i.words[:3] in (["cp", "async", "ca"], ["cp", "async", "cg"]) and len(i.operands) in (3, 4):
            destination, source = self.address(i.operands[0], "u32", i), self.address(i.operands[1], "u64", i)
            count = self.value(i.operands[3], "u32", i) if len(i.operands) == 4 else "None"
            self.emit(
                f"M.copies.issue({i.index}, {destination}, {source}, {self.guard(i)}, {i.operands[2].value}, {count})"
            )
        else:
            raise Unsupported(f"opcode {i.opcode} is not executed by this machine", i.location)

    def _ldmatrix(self, i: Instruction) -> None:
        count = self._fragments(i)
        address = self.address(i.operands[1], "u32", i)
        self.emit(f"v = M.matrices.load({i.index}, {address}, {count}, {'trans' in i.words})")
        self.assign_elements(i.operands[0].parts, "u32", i)

    def _stmatrix(self, i: Instruction) -> None:
        count = self._fragments(i)
        address = self.address(i.operands[0], "u32", i)
        values = self.values(i.operands[1].parts, "u32", i)
        self.emit(f"M.matrices.store({i.index}, {address}, {count}, {'trans' in i.words}, {values})")

    def _fragments(self, i: Instruction) -> int:
        words = [w for w in i.words[1:] if w != "trans"]
        if words[:3] != ["sync", "aligned", "m8n8"] or words[-1] != "b16" or i.guard is not None:
            raise Unsupported(f"form of {i.opcode}", i.location)
        return int(words[3][1:])

    def _mma(self, i: Instruction) -> None:
        shape, result, a, b, c = i.words[3], *i.words[-4:]
        if (shape, a) not in _SHAPES or a != b or (result, c) != ("f32", "f32") or i.words[4:6] != ["row", "col"]:
            raise Unsupported(f"opcode {i.opcode} is not executed by this machine", i.location)
        sums, *operands = i.operands
        fragments = [self.values(o.parts, kind, i) for o, kind in zip(operands, ("u32", "u32", "f32"), strict=True)]
        self.emit(f"v = M.matrices.multiply({i.index}, '{a}', {', '.join(fragments)})")
        self.assign_elements(sums.parts, "f32", i)

    def _wgmma(self, i: Instruction) -> None:
        word = i.words[1]
        if word == "fence":
            return
        if word == "commit_group":
            self.emit(f"M.groups.commit({i.index})")
        elif word == "wait_group":
            self.emit(f"M.groups.wait({i.index}, {i.operands[0].value})")
        else:
            self._wgmma_product(i)

    def _wgmma_product(self, i: Instruction) -> None:
        shape, result, a, b = i.words[4:]
        if result != "f32" or a != b or a not in ("bf16", "f16", "tf32") or i.guard is not None:
            raise Unsupported(f"opcode {i.opcode} is not executed by this machine", i.location)
        sums, left, right, scale, *signs = i.operands
        from_registers = isinstance(left, Vector)
        flags = [flag.value for flag in signs]  # the factors of a and b, then what lies transposed
        if flags[:2] != [1, 1]:
            raise Unsupported(f"{i.opcode} with a sign turned", i.location)
        first = self.values(left.parts, "u32", i) if from_registers else self.values((left,), "u64", i)
        old = self.values(sums.parts, "f32", i)
        columns, depth = (int(n) for n in shape[4:].split("k"))
        names = tuple(part.name for part in sums.parts)
        turned = tuple(flags[2:]) if not from_registers else (0, *flags[2:])
        self.emit(
            f"v = M.groups.multiply({i.index}, '{a}', {columns}, {depth}, {from_registers}, {first}, "
            f"{self.value(right, 'u64', i)}, {self.value(scale, 'p', i)}, {turned}, {old}, {names!r})"
        )
        self.assign_elements(sums.parts, "f32", i)


_SHAPES = {("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "tf32"), ("m16n8k8", "bf16"), ("m16n8k8", "f16")}


def _bits(kind: str) -> int:
    return 1 if kind == "p" else int(kind[1:])


def _variable(name: str) -> str:
    return name.replace("%", "").replace("$", "_")


def _viewed(text: str, kind: str, wanted: str) -> str:
    if kind == wanted:
        return text
    if _bits(kind) == _bits(wanted):
        return f"{text}.view({wanted})"
    return f"{text}.astype(u{_bits(wanted)})" + ("" if wanted[0] == "u" else f".view({wanted})")
