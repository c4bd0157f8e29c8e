"""Translates a kernel's basic blocks to Python functions over numpy arrays: a line per instruction, a variable per
register.

    def block_3(M, S, m):          M: the running programs, S: registers that cross blocks, m: mask of threads here
        r7 = r5 + r6
        ...
        return p2, 5, 4            threads with p2 go to block 5, the others to block 4

A register is an array of shape (programs or 1, threads or 1): values that depend only on the thread index are computed
once for all programs. Variables of a block are dropped after their last use, so that memory is reused while cached.
Registers that cross blocks are stored in S as unsigned bits, merged under m if some threads are elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ptx_check import arithmetic, atomics, forms
from ptx_check.control import CARRY, LEAVING, TYPE_OF, Touched, names, registers_of, results_and_sources
from ptx_check.faults import Unsupported
from ptx_check.operands import variable, viewed
from ptx_check.parse import Address, Instruction, Name, Number, Vector
from ptx_check.products import Product, in_products
from ptx_check.tensor_instructions import TensorInstructions

_IGNORED = ("fence", "membar", "prefetch", "prefetchu", "griddepcontrol")
_SPACES = {"global": "memory", "shared": "shared", "local": "local", "generic": "local"}
_LOAD_MODES = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "weak", "volatile"}
_ATOMIC_MODES = {"global", "shared", "shared::cta", "gpu", "cta", "sys", "cluster", "relaxed", "acquire", "release",
                 "acq_rel", "noftz"}  # fmt: skip


def _last_uses(steps: list[Instruction | Product]) -> list[list[str]]:
    """Registers whose last use is at each step."""
    last: dict[str, int] = {}
    for position, step in enumerate(steps):
        for i in step.instructions if isinstance(step, Product) else (step,):
            for registers in results_and_sources(i):
                last.update({r.name: position for r in registers})
    ending: list[list[str]] = [[] for _ in steps]
    for name, position in last.items():
        ending[position].append(name)
    return ending


class Writer(TensorInstructions):
    """Code generator of one block. marked: registers that may have undefined bits at entry; None: any."""

    def __init__(self, number, block, marked, crossing, labels, parameters, space, late, taken, read, begun) -> None:
        super().__init__(number, block, crossing, labels, parameters, space, marked)
        self.late, self.taken, self.read = late, taken, read
        """Registers written by asynchronous operations, those used by products, and those read by any instruction."""
        self.begun = begun
        """Address operands of cas loops, which begin with a plain load."""
        self.touched = Touched(taken)

    def write(self) -> Writer:
        steps = list(in_products(self.block.instructions))
        end = f"return {self.number + 1}"
        keeping = self.may_have != set()
        for step, ending in zip(steps, _last_uses(steps)):
            self.marked = self.following(step)
            if isinstance(step, Product):
                self.product(step)
            elif step.words[0] in LEAVING and forms.executed(step.opcode):
                end = self.leave(step, step.words[0])
                break
            else:
                self.instruction(step, step.words[0])
            dead = [n for n in ending if n in self.kinds and n not in self.changed]
            if dead:
                self.emit(" = ".join(variable(n) for n in dead) + " = None")
        self.tell_touched()
        if keeping:
            self.emit("U.keep(CROSSING)")
        for name, kind in self.changed.items():
            where, plain = self.crossing[name], TYPE_OF[kind]
            value = viewed(variable(name), self.kinds[name], plain)
            self.emit(f"S[{where}] = {value} if m is None or S[{where}] is None else np.where(m, {value}, S[{where}])")
        self.emit(end)
        return self

    def following(self, step: Instruction | Product) -> bool:
        """Propagate marks from a step's sources to its results. Returns whether any may have marks."""
        if self.may_have is None:
            return True
        found = False
        for i in step.instructions if isinstance(step, Product) else (step,):
            written, read = results_and_sources(i)
            results = {r.name for r in written}
            taken = not self.may_have.isdisjoint(r.name for r in read)
            found = found or taken or not self.may_have.isdisjoint(results)
            if taken and "mma_async" not in i.opcode:  # the marks of their accumulators are checked at run time
                self.may_have |= results
            else:
                self.may_have -= results
        return found

    def leave(self, i: Instruction, base: str) -> str:
        if base == "brx":
            self.use(i.operands[:1], "branched upon", i)
            return f"return {self.value(i.operands[0], 'u32', i)}, {tuple(self.labels[n.text] for n in i.operands[1:])}"
        target = -1 if base != "bra" else self.labels[i.operands[0].text]
        if i.guard is None:
            return f"return {target}"
        taken = self.value(i.guard, "p", i)
        self.follow([i.guard.name], f"U.used({i.index}, ({i.guard.name!r},), None, 'branched upon')")
        return f"return {'~' if i.negated else ''}{taken}, {target}, {self.number + 1}"

    # --------------------------------------------------------------------------------------------- instructions

    def instruction(self, i: Instruction, base: str) -> None:
        self.check(i, base)
        if base not in _IGNORED:
            if "L2::cache_hint" in i.opcode:  # a copy, because the handler drops the hint's operand
                i = replace(i)
            handler = self._carrying if i.opcode in forms.carrying() else getattr(self, f"_{base}", self._computed)
            handler(i)

    def check(self, i: Instruction, base: str) -> None:
        """Check properties common to all instructions."""
        if not forms.executed(i.opcode):
            raise Unsupported(f"opcode {i.opcode} is not executed by this machine", i.location)
        if i.opcode.startswith("fence.proxy.async"):
            self.emit("M.shared.fence()")
        if base in _IGNORED:
            return
        if i.guard is not None:
            self.follow([i.guard.name], f"U.used({i.index}, ({i.guard.name!r},), None, 'a guard')")
        if self.taken and base != "wgmma":
            self.touched.by(i)
        if self.late and "mma_async" not in i.opcode:
            early = sorted({r.name for r in results_and_sources(i)[1]} & self.late)
            if base == "mov" and early:  # the compiler copies and packs registers with pending results
                self.emit(f"if M.groups.open: M.groups.move({names(i.operands[:1])}, {names(i.operands[1:])})")
            elif early:
                self.emit(f"if M.groups.open: M.groups.check({i.index}, {early!r})")

    def tell_touched(self, taken: tuple[str, ...] = ()) -> None:
        for where, touched in zip(("touched", "late"), self.touched.told(taken)):
            if touched:
                self.emit(f"M.groups.{where}.update({touched})")

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
        if self.marked:
            self.mark(target, sources, self._marks_of(i, meant, sources, values), meant.result, i)
        self.assign(target, meant.expression.format(*values), meant.result, i)
        return None

    def _carrying(self, i: Instruction) -> None:
        """Add with carry: one word of a multi-word sum."""
        target, *sources = i.operands
        kind = arithmetic.TYPES[i.words[-1]]
        plain = f"u{kind[1:]}"
        *factors, first, last = (self.value(source, kind, i) for source in sources)
        if i.words[0] in ("mad", "madc"):
            factor, *_ = factors
            first = f"multiply_high({factor}, {first})" if "hi" in i.words else f"({factor} * {first})"
        carry = self.value(CARRY, "p", i) if i.words[0][-1] == "c" else self.constant(Number(0), "p")
        how = "borrowed" if i.words[0].startswith("sub") else "carried"
        self.emit(f"v = {how}({first}.view({plain}), {last}.view({plain}), {carry})")
        given = [*sources, CARRY] if i.words[0][-1] == "c" else sources
        names = tuple(r.name for source in given for r in registers_of(source))
        for position, (to, each) in enumerate(((target, plain), (CARRY, "p"))):
            if position == 0 or "cc" in i.words:
                self.mark(to, given, f"U.whole({names}, {each!r})", each, i)
                self.assign(to, f"v[{position}]", each, i)

    def _createpolicy(self, i: Instruction) -> None:
        """Assign 0: cache policies are ignored."""
        self.assign(i.operands[0], self.constant(Number(0), "u64"), "u64", i)

    def _marks_of(self, i: Instruction, meant: arithmetic.Meaning, sources: list, values: list[str]) -> str:
        """Expression for the marks of a result, in its type's width."""
        base, names = i.words[0], tuple(r.name for source in sources for r in registers_of(source))
        plain = [f"u{kind[1:]}" if kind[0] == "f" else kind for kind in (*meant.operands, meant.result)]
        marks = [self.marks(source, kind) for source, kind in zip(sources, plain)]
        unsigned = meant.result if meant.result == "p" else f"u{meant.result[1:]}"
        if base in ("and", "or"):
            return f"{base}ed({values[0]}, {values[1]}, {marks[0]}, {marks[1]})"
        if base in ("xor", "not"):  # a bit is as undefined as those that it is made of
            return " | ".join(marks)
        if base == "setp" and len(sources) == 3 and i.words[2] in ("and", "or"):
            compared = meant.expression.format(values[0], values[1], i.words[2] == "and")  # neutral third operand
            both = f"U.whole({names[:-1]}, 'p')"
            return f"{i.words[2]}ed({compared}, {values[2]}, {both}, {marks[2]})"
        data = arithmetic.moved(i.opcode, len(sources))
        if data:
            steering = tuple(r.name for source in sources[data:] for r in registers_of(source))
            moved = meant.expression.format(*marks[:data], *values[data:])
            return f"({moved})" + (f" | U.whole({steering}, {unsigned!r}).view({plain[-1]})" if steering else "")
        if base == "cvt" and i.words[-2].endswith("x2") and len(sources) == 2:
            high, low = (tuple(r.name for r in registers_of(source)) for source in sources)
            half = f"u{int(meant.result[1:]) // 2}"
            return f"pack(U.whole({low}, {half!r}), U.whole({high}, {half!r}))"
        if i.words[-1].endswith("x2") and base != "cvt":
            return f"U.halves({names}, {unsigned!r})"
        return f"U.whole({names}, {unsigned!r})"

    def _compared_pairs(self, i: Instruction, meant, targets) -> None:
        """setp of 16-bit pairs: one predicate for the lower halves and one for the upper halves."""
        if not i.words[-1].endswith("x2"):
            raise Unsupported(f"form of {i.opcode}", i.location)
        pair, joined = i.operands[1:3], i.operands[3:]
        values = [self.value(source, "u32", i) for source in pair]
        third = [self.value(source, "p", i) for source in joined]
        names = tuple(r.name for source in i.operands[1:] for r in registers_of(source))
        for side, target in enumerate(targets):
            self.mark(target, i.operands[1:], f"U.whole({names}, 'p')", "p", i)
            self.assign(target, meant.expression.format(*(f"halves({v})[{side}]" for v in values), *third), "p", i)

    def _mov(self, i: Instruction) -> None:
        target, source = i.operands
        if not isinstance(target, Vector):
            return self._computed(i)
        whole = "u" + i.opcode.split(".")[1][1:]
        if len(target.parts) == 4:
            part = int(whole[1:]) // 4
            self.emit(f"v = {self.value(source, whole, i)}")
            for position, destination in enumerate(target.parts):
                shifted = f"({self.marks(source, whole)} >> {whole}({position * part})).astype(u{part})"
                self.mark(destination, (source,), shifted, f"u{part}", i)
                self.assign(destination, f"(v >> {whole}({position * part})).astype(u{part})", f"u{part}", i)
            return None
        half = f"u{int(whole[1:]) // 2}"
        self.emit(f"low, high = halves({self.value(source, whole, i)})")
        for side, (part, text) in enumerate(zip(target.parts, ("low", "high"), strict=True)):
            self.mark(part, (source,), f"halves({self.marks(source, whole)})[{side}]", half, i)
            self.assign(part, text, half, i)
        return None

    def _ld(self, i: Instruction) -> None:
        space, kind, size, targets = self._access(i, i.operands[0])
        if space == "param":
            return self._parameter(i, kind, size)
        self.unhinted(i)
        address = self._place(i.operands[1], space, i)
        self.use(i.operands[1:], "an address", i)
        kept = "None" if i.guard is None else self.values(targets, f"u{8 * size}", i)
        call = f"M.{_SPACES[space]}.load({i.index}, {address}, {self.guard(i)}, {size}, {len(targets)}, {kept})"
        if space == "global" and size == 4 and i.operands[1] in self.begun and i.guard is None:
            call = f"M.memory.glance({i.index}, {address})"
        self.emit(f"v = {call}")
        self.load_marks(targets, f"u{8 * size}", kind, i)
        for position, target in enumerate(targets):
            self.assign(target, viewed(f"v[{position}]", f"u{8 * size}", kind), kind, i, kept=True)
        return None

    def _place(self, operand: Address, space: str, i: Instruction) -> str:
        """Expression for an address: 64 bits in global memory, else 32."""
        if space == "generic":
            return f"M.own({i.index}, {self.address(operand, 'u64', i)})"
        return self.address(operand, "u64" if space == "global" else "u32", i)

    def _parameter(self, i: Instruction, kind: str, size: int) -> None:
        target, address = i.operands
        if isinstance(address.base, Name):
            text = f"M.parameter_part({self.parameters[address.base.text][0]}, {address.offset}, u{8 * size})"
        else:
            text = f"M.parameter({self.address(address, 'u64', i)}).astype(u{8 * size})"
        self.assign(target, viewed(text, f"u{8 * size}", kind), kind, i)

    def _st(self, i: Instruction) -> None:
        space, _, size, sources = self._access(i, i.operands[1])
        self.unhinted(i)
        address = self._place(i.operands[0], space, i)
        values = self.values(sources, f"u{8 * size}", i)
        self.use(i.operands[:1], "an address", i)
        marks = ""
        if space == "global":
            self.use(i.operands[1:], "stored in global memory", i)
        else:
            names = [r.name for source in sources for r in registers_of(source)]
            marks = f", U.taken({tuple(names)}, u{8 * size}) if T else None"
        self.emit(f"M.{_SPACES[space]}.store({i.index}, {address}, {self.guard(i)}, {size}, {values}{marks})")

    def _red(self, i: Instruction) -> None:
        self._exchange(i, Name("_"), *i.operands)

    def _atom(self, i: Instruction) -> None:
        self._exchange(i, *i.operands)

    def _exchange(self, i: Instruction, target: object, place: Address, *values: object) -> None:
        """Emit an atomic operation; cas compares with the first of two values and stores the second."""
        modes = set(i.words[1:]) & _ATOMIC_MODES
        operation, kind = (word for word in i.words[1:] if word not in _ATOMIC_MODES)
        space = "shared" if modes & {"shared", "shared::cta"} else "global"
        plain = f"u{8 * np.dtype(atomics.TYPES[kind]).itemsize}"
        if len(values) != 1 + (operation == "cas"):
            raise Unsupported(f"operands of {i.opcode}", i.location)
        *compared, value = (self.value(each, plain, i) for each in values)
        address = self._place(place, space, i)
        self.use([place, *values], f"taken into {space} memory", i)
        wanted = any(r.name in self.read for r in registers_of(target))
        orders = bool(modes & {"acquire", "acq_rel"}), bool(modes & {"release", "acq_rel"})
        call = (
            f"M.{_SPACES[space]}.exchange({i.index}, {address}, {self.guard(i)}, {(operation, kind)}, {orders}, {value}"
        )
        self.emit(f"v = {call}, {compared[0] if compared else None}, {wanted})")
        self.mark(target, (), self.constant(Number(0), plain), plain, i)
        if wanted:
            self.assign(target, "v", plain, i)

    def _access(self, i: Instruction, data: object) -> tuple[str, str, int, tuple]:
        """Address space, type, bytes per element and registers of a load or store."""
        words = [w for w in i.words[1:] if not w.startswith(("L1::", "L2::")) and w not in _LOAD_MODES]
        words = words if words[0].split("::")[0] in ("param", *_SPACES) else ["generic", *words]
        space, kind = words[0].split("::")[0], arithmetic.TYPES[words[-1]]
        count = int(words[1][1:]) if len(words) == 3 and words[1][0] == "v" else 1
        if int(kind[1:]) // 8 * count > 16:
            raise Unsupported(f"opcode {i.opcode} is not executed by this machine", i.location)
        registers = data.parts if isinstance(data, Vector) else (data,)
        if len(registers) != count or len(i.operands) != 2 + ("L2::cache_hint" in i.words):
            raise Unsupported(f"operands of {i.opcode}", i.location)
        return space, kind, int(kind[1:]) // 8, registers

    def _ldmatrix(self, i: Instruction) -> None:
        count = self._fragments(i)
        address = self.address(i.operands[1], "u32", i)
        self.use(i.operands[1:], "an address", i)
        self.emit(f"v = M.matrices.load({i.index}, {address}, {count}, {'trans' in i.words})")
        self.load_marks(i.operands[0].parts, "u32", "u32", i)
        self.assign_elements(i.operands[0].parts, "u32", i)

    def _stmatrix(self, i: Instruction) -> None:
        count = self._fragments(i)
        address = self.address(i.operands[0], "u32", i)
        values = self.values(i.operands[1].parts, "u32", i)
        self.use(i.operands[:1], "an address", i)
        marks = f"U.taken({tuple(r.name for r in registers_of(i.operands[1]))}, u32) if T else None"
        self.emit(f"M.matrices.store({i.index}, {address}, {count}, {'trans' in i.words}, {values}, {marks})")

    def _fragments(self, i: Instruction) -> int:
        if i.guard is not None:
            raise Unsupported(f"form of {i.opcode}", i.location)
        return int(i.words[4][1:])

    def _mma(self, i: Instruction) -> None:
        if i.guard is not None:
            raise Unsupported(f"form of {i.opcode}", i.location)
        self.mma_marks(i)
        sums, a, b, old = (operand.parts for operand in i.operands)
        self._multiply(i, (1, 1, 1), sums, a, b, old)

    def product(self, p: Product) -> None:
        """Emit several mma instructions as one product."""
        for i in p.instructions:
            self.check(i, "mma")
        sums, rows, columns = ([r for part in parts for r in part] for parts in (p.sums, p.rows, p.columns))
        if self.marked:
            self.follow([r.name for r in (*sums, *rows, *columns)], "")
            marks = len(self.body)
            for i in p.instructions:
                self.mma_marks(i)
            self.body[marks:] = [f"    {line}" for line in self.body[marks:]]
        self._multiply(p.instructions[0], (len(p.rows), len(p.columns), p.steps), sums, rows, columns, sums)

    def mma_marks(self, i: Instruction) -> None:
        """Propagate marks of operands to the accumulators."""
        if not self.marked:
            return
        of_sums, a, b, _ = i.words[-4:]
        sums, *operands = i.operands
        register = _registers_of_products(i)
        names = [r.name for o in operands for r in registers_of(o)]
        marks = ["(" + "".join(f"{self.marks(part, register)}, " for part in o.parts) + ")" for o in operands]
        found = f"M.matrices.unknown({(a, b, of_sums)}, {', '.join(marks)})"
        self.follow(names, f"U.loaded(U.origin({tuple(names)}), {found})")
        self.put_loaded(sums.parts, register, register, i)

    def _multiply(self, i: Instruction, tiles: tuple[int, int, int], sums, a, b, old) -> None:
        register = _registers_of_products(i)
        kinds = (*i.words[-3:-1], i.words[-4])
        fragments = ", ".join(self.values(parts, register, i) for parts in (a, b, old))
        self.emit(f"v = M.matrices.multiply({i.index}, {kinds}, {'satfinite' in i.words}, {tiles}, {fragments})")
        self.assign_elements(sums, register, i)

    def _wgmma(self, i: Instruction) -> None:
        word = i.words[1]
        if word == "fence":
            self.touched.fence()
            self.emit("M.groups.fence()")
            return
        if word == "commit_group":
            self.touched.commit()
            self.emit(f"M.groups.commit({i.index})")
        elif word == "wait_group":
            self.emit(f"M.groups.wait({i.index}, {i.operands[0].value})")
        else:
            self._wgmma_product(i)

    def _wgmma_product(self, i: Instruction) -> None:
        shape, of_sums, a, b = i.words[4:8]
        if i.guard is not None:
            raise Unsupported(f"opcode {i.opcode} is not executed by this machine", i.location)
        sums, left, right, scale, *signs = i.operands
        from_registers = isinstance(left, Vector)
        flags = [flag.value for flag in signs]  # the signs of a and b, then whether they are transposed
        if flags[:2] not in ([1, 1], []):  # integer products have no flags
            raise Unsupported(f"{i.opcode} with a sign turned", i.location)
        first = self.values(left.parts, "u32", i) if from_registers else self.values((left,), "u64", i)
        old = self.values(sums.parts, "u32", i)
        columns, depth = (int(n) for n in shape[4:].split("k"))
        names = tuple(part.name for part in sums.parts)
        taken = names + (tuple(part.name for part in left.parts) if from_registers else ())
        self.tell_touched(taken)
        self.emit(f"M.groups.check_fence({i.index}, {taken})")
        self.use([right, scale] if from_registers else [left, right, scale], "a descriptor or a scale", i)
        marks = f"U.taken({taken[len(names) :]}, u32) if T else None" if from_registers else "None"
        transposed = [*flags[2:], 0, 0]  # only for 16-bit types, and for operands in shared memory
        turned = (0, transposed[0]) if from_registers else tuple(transposed[:2])
        self.emit(
            f"v = M.groups.multiply({i.index}, {(a, b, of_sums)}, {'satfinite' in i.words}, {columns}, {depth}, "
            f"{from_registers}, {first}, {self.value(right, 'u64', i)}, {self.value(scale, 'p', i)}, {turned}, "
            f"{old}, {names!r}, {marks})"
        )
        self.point(i)
        self.follow(["", *names, *taken], f"U.summed({i.index}, {names}, {taken}, {self.value(scale, 'p', i)})")
        self.point(i, names)
        self.assign_elements(sums.parts, "u32", i)


def _registers_of_products(i: Instruction) -> str:
    """Type of the registers of an mma."""
    return "u64" if i.words[-3] == "f64" else "u32"
