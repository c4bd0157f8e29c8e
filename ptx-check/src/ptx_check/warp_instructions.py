"""Code generators for warp-level instructions: shuffles, votes, reductions, barriers."""

from ptx_check import arithmetic
from ptx_check.control import registers_of
from ptx_check.faults import Unsupported
from ptx_check.operands import Operands
from ptx_check.parse import Instruction, Number, Vector


class WarpInstructions(Operands):
    """Code generators for instructions between lanes."""

    def _shfl(self, i: Instruction) -> None:
        target, source, lane, clamp, members = i.operands
        if isinstance(target, Vector) or not isinstance(clamp, Number):
            raise Unsupported(f"form of {i.opcode}", i.location)
        sources = f"{self.value(source, 'u32', i)}, {self.value(lane, 'u32', i)}, {clamp.value}"
        sources += f", {self.members(members, i)}"
        self.use([lane], "a lane", i)
        self.emit(f"v = M.shuffle({i.index}, '{i.words[2]}', {sources})")
        names = tuple(r.name for r in registers_of(source))
        moved = f"M.shuffle({i.index}, '{i.words[2]}', {self.marks(source, 'u32')}, {sources.split(', ', 1)[1]})"
        moved = f"U.put({target.name!r}, {moved} | U.fresh(1, 'u32')[0], {self.guard(i)}, {(*names, '')})"
        self.point(i)
        self.follow(["", *names, target.name], moved)
        self.assign(target, "v", "u32", i)

    def members(self, mask: object, i: Instruction) -> str:
        """Lane mask of an instruction; None: all lanes."""
        if isinstance(mask, Number) and mask.value & 0xFFFFFFFF == 0xFFFFFFFF:
            return "None"
        self.use([mask], "a mask of lanes", i)
        return self.value(mask, "u32", i)

    def _vote(self, i: Instruction) -> None:
        target, source, members = i.operands
        mode = i.words[2]
        names = tuple(r.name for r in registers_of(source))
        kind = "u32" if mode == "ballot" else "p"
        text = f"U.voted({names[0]!r})" if names else self.constant(Number(0), "p")
        self.mark(target, [source], f"np.where({text}, ~{kind}(0), {kind}(0))" if kind == "u32" else text, kind, i)
        self.assign(target, f"M.vote({i.index}, '{mode}', {self.value(source, 'p', i)}, {self.members(members, i)})",
                    "u32" if mode == "ballot" else "p", i)  # fmt: skip

    def _redux(self, i: Instruction) -> None:
        target, source, members = i.operands
        kind = arithmetic.TYPES[i.words[-1]]
        names = tuple(r.name for r in registers_of(source))
        self.mark(target, [source], f"np.where(U.voted({names[0]!r}), ~u32(0), u32(0))" if names else "0", "u32", i)
        value, operation = self.value(source, kind, i), i.words[2]
        if kind == "f32":
            value = f"np.abs({value})" if "abs" in i.words else value
            operation = f"{operation}{'imum' if 'NaN' in i.words else ''}.f32"
        text = f"M.reduce({i.index}, {operation!r}, {value}, {self.members(members, i)})"
        self.assign(target, text, kind, i)

    def _activemask(self, i: Instruction) -> None:
        self.assign(i.operands[0], "M.running()", "u32", i)

    def _bar(self, i: Instruction) -> None:
        if i.opcode == "bar.warp.sync":
            self.emit(f"M.warp_barrier({i.index}, {self.members(i.operands[0], i)})")
        elif len(i.operands) > 2 or i.guard is not None:
            raise Unsupported(f"form of {i.opcode}", i.location)
        else:
            self.use(i.operands, "a barrier's number or its threads", i)
            number, *count = (self.value(each, "u32", i) for each in i.operands)
            self.emit(f"M.barrier({i.index}, {number}, {count[0] if count else None})")

    _barrier = _bar

    def _setmaxnreg(self, i: Instruction) -> None:
        self.emit(f"M.teams.setmaxnreg({i.index}, {i.operands[0].value})")
