"""Code generators for tensor memory, mbarriers, calls and asynchronous copies."""

from ptx_check.bulk_copies import LONG, offset_of
from ptx_check.control import registers_of
from ptx_check.faults import Unsupported
from ptx_check.parse import Address, Instruction, Name, Vector
from ptx_check.warp_instructions import WarpInstructions


class TensorInstructions(WarpInstructions):
    """Code generators for tensor memory, mbarriers and asynchronous copies."""

    def _elect(self, i: Instruction) -> None:
        """elect.sync: the elected lane, and whether this thread is elected."""
        if not isinstance(i.operands[0], Vector) or i.guard is not None:
            raise Unsupported(f"form of {i.opcode}", i.location)
        lane, chosen = i.operands[0].parts
        self.emit(f"v = M.elect({i.index}, {self.members(i.operands[1], i)})")
        self.assign(lane, "v[0]", "u32", i)
        self.assign(chosen, "v[1]", "p", i)

    def _mbarrier(self, i: Instruction) -> None:
        if i.words[1] == "try_wait":
            target, place, parity = i.operands
            self.use([place, parity], "an address or a phase", i)
            where, phase = self.address(place, "u32", i), self.value(parity, "u32", i)
            return self.assign(target, f"M.barriers_of_memory.wait({i.index}, {where}, {phase})", "p", i)
        if i.words[1] == "arrive":
            state, place, *count = i.operands
            if state != Name("_"):
                raise Unsupported(f"a result of {i.opcode}", i.location)
            self.use([place, *count], "an address or a count", i)
            call = f"{i.index}, {self.address(place, 'u32', i)}, {self.guard(i)}"
            if i.words[2] != "expect_tx":
                if count:
                    raise Unsupported(f"operands of {i.opcode}", i.location)
                return self.emit(f"M.barriers_of_memory.arrive({call})")
            return self.emit(f"M.barriers_of_memory.expect({call}, {self.value(count[0], 'u32', i)})")
        place, *count = i.operands
        self.use([place], "an address", i)
        call = f"{i.index}, {self.address(place, 'u32', i)}, {self.guard(i)}"
        if i.words[1] == "init":
            return self.emit(f"M.barriers_of_memory.init({call}, {count[0].value})")
        return self.emit(f"M.barriers_of_memory.invalidate({call})")

    def _call(self, i: Instruction) -> None:
        text, *others = i.operands
        self.use([text], "an address", i)
        given = f"{i.index}, {self.guard(i)}, {self.value(text, 'u64', i)}"
        if i.words[1] == "vprintf":
            self.emit(f"M.calls.printed({given}, {self.value(others[0], 'u64', i)})")
        else:
            self.emit(f"M.calls.failed({given})")

    def _cvta(self, i: Instruction) -> None:
        """cvta is a mov: global addresses equal generic ones, and local addresses are only passed to calls."""
        target, source = i.operands
        self.mark(target, (source,), self.marks(source, "u64"), "u64", i)
        self.assign(target, self.value(source, "u64", i), "u64", i)

    def _tensormap(self, i: Instruction) -> None:
        self.use(i.operands, "a tensor map", i)
        place, *rest = i.operands
        if i.words[1] == "cp_fenceproxy":
            source = f"{self.address(rest[0], 'u64', i)}.astype(u32)"
            return self.emit(f"M.bulk.publish({i.index}, {self.address(place, 'u64', i)}, {source}, {self.guard(i)})")
        *dimension, value = rest
        field = i.words[3]
        size, offset = 8 if field in LONG else 4, offset_of(field, dimension[0].value if dimension else 0)
        where = f"{self.address(place, 'u64', i)}.astype(u32) + u32({offset})"
        stored = f"({self.value(value, f'u{8 * size}', i)},)"
        return self.emit(f"M.shared.store({i.index}, {where}, {self.guard(i)}, {size}, {stored})")

    def unhinted(self, i: Instruction) -> None:
        """Drop the cache-policy operand of an instruction."""
        if "L2::cache_hint" in i.words:
            i.operands = i.operands[:-1]

    def _cp(self, i: Instruction) -> None:
        if "bulk" in i.words:
            self.bulk(i)
        elif i.opcode == "cp.async.commit_group":
            self.emit(f"M.copies.commit({i.index})")
        elif i.opcode == "cp.async.wait_group":
            self.emit(f"M.copies.wait({i.index}, {i.operands[0].value})")
        elif i.opcode == "cp.async.wait_all":
            self.emit(f"M.copies.commit({i.index})")
            self.emit(f"M.copies.wait({i.index}, 0)")
        else:
            self.unhinted(i)
            if len(i.operands) not in (3, 4):
                raise Unsupported(f"operands of {i.opcode}", i.location)
            destination, source = self.address(i.operands[0], "u32", i), self.address(i.operands[1], "u64", i)
            count = self.value(i.operands[3], "u32", i) if len(i.operands) == 4 else "None"
            self.use(i.operands, "an address or a size", i)
            self.emit(
                f"M.copies.issue({i.index}, {destination}, {source}, {self.guard(i)}, {i.operands[2].value}, {count})"
            )

    def bulk(self, i: Instruction) -> None:
        """cp.async.bulk."""
        if i.words[3] == "commit_group":
            return self.emit(f"M.bulk.commit({self.guard(i)})")
        if i.words[3] == "wait_group":
            return self.emit(f"M.bulk.wait({self.guard(i)}, {i.operands[0].value})")
        self.use(i.operands, "an address or a coordinate", i)
        reduces = i.words[1] == "reduce"
        loads = i.words[5] == "shared::cta"
        outside, inside = i.operands[1 if loads else 0], i.operands[0 if loads else 1]
        if not isinstance(outside, Vector) or len(i.operands) != 2 + loads:
            raise Unsupported(f"operands of {i.opcode}", i.location)
        place, coordinates = outside.parts
        tile = f"{self.value(place, 'u64', i)}, {self.values(coordinates.parts, 'u32', i)}"
        shared = self.address(inside, "u32", i)
        if loads:
            barrier = self.address(i.operands[2], "u32", i)
            return self.emit(f"M.bulk.load({i.index}, {self.guard(i)}, {shared}, {tile}, {barrier})")
        operation = i.words[8] if reduces else ""
        return self.emit(f"M.bulk.store({i.index}, {self.guard(i)}, {tile}, {shared}, {operation!r})")

    def _tcgen05(self, i: Instruction) -> None:
        what = i.words[1]
        if what == "alloc":
            place, columns = i.operands
            self.emit(
                f"M.tensor.allocate({i.index}, {self.address(place, 'u32', i)}, {self.guard(i)}, {columns.value})"
            )
        elif what == "wait::ld":
            self.emit("M.groups.loaded()")
        elif what == "wait::st":
            self.emit("M.tensor.wait()")
        elif what == "commit":
            self.use(i.operands, "an address", i)
            self.emit(f"M.tensor.commit({i.index}, {self.address(i.operands[0], 'u32', i)}, {self.guard(i)})")
        elif what == "mma":
            self._tensor_product(i)
        elif what in ("ld", "st"):
            self._tensor_access(i)

    def _tensor_product(self, i: Instruction) -> None:
        if len(i.operands) != 5:
            raise Unsupported(f"operands of {i.opcode}", i.location)
        sums, left, right, form, adding = i.operands
        self.use(i.operands, "a descriptor or an address", i)
        inside = isinstance(left, Address)
        first = self.address(left, "u32", i) if inside else self.value(left, "u64", i)
        self.emit(
            f"M.tensor.multiply({i.index}, {i.words[-1]!r}, {self.guard(i)}, {self.address(sums, 'u32', i)}, {first}, "
            f"{self.value(right, 'u64', i)}, {self.value(form, 'u32', i)}, {self.value(adding, 'p', i)}, {inside})"
        )

    def _tensor_access(self, i: Instruction) -> None:
        """tcgen05.ld and st: one register per column, or per two columns of 16 bits."""
        shape, loads = i.words[4], i.words[1] == "ld"
        if loads:
            vector, place, *numbers = i.operands
        else:
            place, *numbers, vector = i.operands
        if (
            not isinstance(vector, Vector)
            or len(vector.parts) != int(i.words[5][1:])
            or (i.guard is not None and loads)
        ):
            raise Unsupported(f"operands of {i.opcode}", i.location)
        split, narrow = numbers[0].value if numbers else 0, "16b" in i.words[-2]
        self.use([place], "an address", i)
        if loads:
            names = tuple(r.name for r in registers_of(vector))
            where = self.address(place, "u32", i)
            self.emit(f"v = M.tensor.load({i.index}, {where}, {shape!r}, {split}, {len(names)}, {narrow})")
            self.load_marks(vector.parts, "u32", "u32", i)
            self.assign_elements(vector.parts, "u32", i)
            return self.emit(f"M.groups.loading({names})")
        values = self.values(vector.parts, "u32", i)
        marks = f"U.taken({tuple(r.name for r in registers_of(vector))}, u32) if T else None"
        where = f"{self.address(place, 'u32', i)}, {self.guard(i)}"
        return self.emit(f"M.tensor.store({i.index}, {where}, {shape!r}, {split}, {values}, {marks}, {narrow})")
