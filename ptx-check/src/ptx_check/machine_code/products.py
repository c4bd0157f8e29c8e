"""Matrix products: HMMA of one warp, asynchronous HGMMA of four.

Each warp computes its own 16 of a warpgroup's 64 rows. A product is computed when issued (early) or at the wait that
covers it (late): then its accumulators are NaN in between, and shared memory is read at the wait. The left operand's
registers are read when issued in both orders, because a scoreboard guards them.
Fragment layouts are described in matrices.py, descriptors in warpgroup.py.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_check.machine_code.integers import Step
from ptx_check.machine_code.memory import RESERVED, whole
from ptx_check.machine_code.operands import F32, U32, U64, Code, predicate
from ptx_check.matrices import elements
from ptx_check.warpgroup import positions

_KINDS = {"BF16": ("bf16", 2), "TF32": ("tf32", 4)}
_NOTHING = U32(0x7FFFFFFF)


def _kind(code: Code) -> tuple[str, int]:
    """Operand type, and bytes per element."""
    return next((_KINDS[word] for word in code.words if word in _KINDS), ("f16", 2))


def _numbers(register: Any, kind: str, size: int) -> Any:
    """Convert a register (warps, 32) to elements (warps, 8, columns)."""
    raw = np.ascontiguousarray(register).view(np.uint16 if size == 2 else U32)
    return elements(raw.reshape(len(register), 8, -1), kind)


def _left(registers: Any, kind: str, size: int) -> Any:
    """Left operand (warps, 16, depth) from registers."""
    columns = [np.concatenate([_numbers(r, kind, size) for r in registers[first : first + 2]], 1)
               for first in range(0, len(registers), 2)]  # fmt: skip
    return np.concatenate(columns, 2)


def _sums(product: Any) -> Any:
    """Distribute products (warps, 16, columns) to registers (registers, warps, 32)."""
    warps, _, columns = product.shape
    parts = product.reshape(warps, 2, 8, columns // 8, 4, 2)
    return np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4)).reshape(columns // 2, warps, 32)


def multiply(code: Code) -> Step:
    words = code.only("16816", "1688", "F32", "BF16", "TF32")
    code.count(4)
    kind, size = _kind(code)
    if "F32" not in words or (kind == "tf32") != ("1688" in words and "TF32" in words):
        raise code.unknown()
    numbers = [each.number for each in code.operands]
    if any(each.file != "R" or each.signs for each in code.operands):
        raise code.unknown("of this form is not known")
    deep = "16816" in words
    count = 4 if deep or kind == "tf32" else 2
    target, a, b, c = numbers
    zero = code.operands[3].zero

    def step(s: Any) -> None:
        whole(s, code)
        rows = s.w
        left = _left([s.R[a + r][rows] for r in range(count)], kind, size)
        right = np.concatenate([_numbers(s.R[b + r][rows], kind, size) for r in range(count // 2)], 2)
        made = _sums(np.matmul(left, right.swapaxes(1, 2)))
        for r in range(4):
            old = F32(0) if zero else s.R[c + r][rows].view(F32)
            s.put(target + r, (made[r] + old).view(U32))

    return step


@dataclass(slots=True)
class Product:
    """An HGMMA issued by some warps."""

    code: Code
    rows: Any
    """Participating warps."""
    group: Any
    """Product group in each warp."""
    keep: Any
    """(warps, 1) mask: whether to accumulate."""
    left: Any
    """Left operand: elements (warps, 16, depth), or descriptors (warps,)."""
    right: Any
    """Descriptors (warps,) of the right operand."""
    fenced: Any
    """Time of each warp's last fence.proxy.async."""

    def part(self, some: Any) -> "Product":
        parts = self.rows, self.group, self.keep, self.left, self.right, self.fenced
        return Product(self.code, *(each[some] for each in parts))


@dataclass(frozen=True, slots=True)
class Form:
    """An HGMMA's shape, types and registers."""

    columns: int
    depth: int
    kind: str
    size: int
    turned: tuple[bool, bool]
    target: int
    fragments: int | None
    """First register of the left operand; None: in shared memory."""
    descriptors: int


def multiply_group(code: Code) -> Step:
    shape = re.match(r"64x(\d+)x(\d+)$", code.words[0])
    if shape is None or "F32" not in code.words:
        raise code.unknown()
    code.only(code.words[0], "F32", "BF16", "TF32")
    operands = list(code.operands)
    last = operands[-1].text == "gsb0" and bool(operands.pop())
    target = operands.pop(0)
    fragments = operands.pop(0).number if operands[0].file == "R" else None
    found = re.match(r"gdesc\[UR(\d+)\]((?:\.tnsp[AB])*)$", operands.pop(0).text)
    if found is None or not operands or operands[0].file != "R":
        raise code.unknown("of this form is not known")
    before = operands.pop(0)
    if not before.zero and before.number != target.number:
        raise code.unknown("with sums of other registers is not known")
    kept = predicate(operands.pop(0), code) if operands else None
    if operands:
        raise code.unknown("of this form is not known")
    kind, size = _kind(code)
    form = Form(int(shape[1]), int(shape[2]), kind, size, ("tnspA" in found[2], "tnspB" in found[2]), target.number,
                fragments, int(found[1]))  # fmt: skip
    if before.zero:
        kept = predicate_never
    return _issue(code, form, kept, last)


def predicate_never(s: Any) -> Any:
    return np.zeros((1, 1), dtype=bool)


def registers_of(code: Code) -> set[int]:
    """Registers used by an HGMMA: its accumulators, and its left operand if in registers."""
    columns = int(code.words[0].split("x")[1])
    first, second = code.operands[:2]
    fragments = range(second.number, second.number + 4) if second.file == "R" else ()
    return {*range(first.number, first.number + columns // 2), *fragments}


def _issue(code: Code, form: Form, kept: Any, last: bool) -> Step:
    sums, registers = form.columns // 2, 4
    names = list(range(form.target, form.target + sums))
    if form.fragments is not None:
        names += range(form.fragments, form.fragments + registers)

    def descriptors(s: Any, first: int) -> Any:
        low, high = (s.UR[first + k][s.w][:, 0].astype(U64) for k in (0, 1))
        return low | high << U64(32)

    def step(s: Any) -> None:
        whole(s, code)
        rows = s.rows
        if s.touched[np.ix_(names, rows)].any():
            s.fault("fence", code, "a product takes registers that others touched with no wgmma.fence in between")
        if form.fragments is None:
            left = descriptors(s, form.descriptors)
        else:
            left = _left([s.R[form.fragments + r][s.w] for r in range(registers)], form.kind, form.size)
        right = descriptors(s, form.descriptors + 2)
        keep = np.broadcast_to(np.array([[True]]) if kept is None else kept(s), (len(rows), 1))
        product = Product(code, rows, s.products[rows].copy(), keep, left, right, s.fenced[rows].copy())
        place = slice(form.target, form.target + sums)
        if s.order.products:
            fresh = rows[~s.flying[form.target, rows]]
            s.sums[place, fresh] = s.R[place, fresh].view(F32)
            s.R[place, rows] = _NOTHING
            s.flying[form.target, rows] = True
            s.pending.append((product, form))
        else:
            s.R[place, rows] = _total(s, product, form, s.R[place, rows].view(F32)).view(U32)
        if last:
            s.products[rows] += 1

    return step


def _total(s: Any, product: Product, form: Form, before: Any) -> Any:
    """Accumulators (registers, warps, 32) after the product."""
    warp, left = s.warp[product.rows][:, 0], product.left
    if form.fragments is None:
        left = _operand(s, product, left, 64, form, form.turned[0])
        left = left.reshape(len(left), 4, 16, -1)[np.arange(len(left)), warp % 4]
    right = _operand(s, product, product.right, form.columns, form, form.turned[1])
    made = _sums(np.matmul(left, right.swapaxes(1, 2)))
    return made + (before if product.keep.all() else np.where(product.keep, before, F32(0)))


def _operand(s: Any, product: Product, descriptor: Any, rows: int, form: Form, turned: bool) -> Any:
    """Elements (warps, rows, depth) of an operand in shared memory."""
    code, shared, program = product.code, s.shared, s.program[product.rows][:, 0].astype(U64)
    keys, back = np.unique(np.stack([descriptor, program], 1), axis=0, return_inverse=True)
    back = back.reshape(-1)
    try:
        at = positions(keys[:, 0], rows, form.depth, form.size, turned)
    except ValueError as error:
        s.fault("bounds", code, str(error))
        return np.full((len(descriptor), rows, form.depth), np.nan, F32)
    if at.min() < RESERVED or at.max() + form.size > shared.end:
        bad = at[(at < RESERVED) | (at + form.size > shared.end)]
        s.fault("bounds", code, f"a product reads at {bad[0]:#x}, outside of the program's shared memory")
        at = np.clip(at, RESERVED, shared.end - form.size)
    places = at + keys[:, 1].astype(np.int64)[:, None, None] * shared.pitch
    fenced = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(fenced, back, product.fenced)
    if s.unfenced(places >> 4, fenced[:, None, None]):
        s.fault("fence", code, "a product reads what was written with no fence.proxy.async in between")
    return elements(shared.views[form.size].take(places // form.size), form.kind)[back]


def group_barrier(code: Code) -> Step:
    """WARPGROUP.ARRIVE: the fence before a group's first product; DEPBAR: wait for all but the youngest groups."""
    words = code.only("ARRIVE", "DEPBAR", "LE")
    if "ARRIVE" in words:

        def fence(s: Any) -> None:
            s.touched[:, s.rows] = False

        return fence
    if code.operands[0].text != "gsb0":
        raise code.unknown("of this form is not known")
    most = code.operands[1].number

    def step(s: Any) -> None:
        if s.pending:
            _finish(s, most)

    return step


def _finish(s: Any, most: int) -> None:
    waiting = np.zeros(len(s.products), bool)
    waiting[s.rows] = True
    kept = []
    for product, form in s.pending:
        here = waiting[product.rows] & (product.group < s.products[product.rows] - most)
        if here.any():
            part, place = product.part(here), slice(form.target, form.target + form.columns // 2)
            s.sums[place, part.rows] = _total(s, part, form, s.sums[place, part.rows])
        if not here.all():
            kept.append((product.part(~here), form))
    left: dict[int, set[int]] = {}
    for product, form in kept:
        left.setdefault(form.target, set()).update(product.rows.tolist())
    for product, form in s.pending:  # products of other warps may start at the same register and be wider
        place = slice(form.target, form.target + form.columns // 2)
        done = product.rows[s.flying[form.target, product.rows] & waiting[product.rows]]
        done = done[~np.isin(done, list(left.get(form.target, ())))]
        s.R[place, done] = s.sums[place, done].view(U32)
        s.flying[form.target, done] = False
    s.pending = kept


MEANINGS = {"HMMA": multiply, "HGMMA": multiply_group, "WARPGROUP": group_barrier}
