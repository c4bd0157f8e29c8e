"""Kernels that move bytes: their instructions for an element beside the time that its bytes take.

    share = cycles an element of the busiest unit / cycles in which the memory brings and takes the element's bytes

Below 1 the memory is what such a kernel waits for, if enough warps are resident. Bytes are those that must move:
each operand once. Cycles are those of the loop that walks over a row, or of the whole program where it has none.
Attention of short rows is among them, of as many queries as a tile has keys: an element is a score there.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import budgets
from fasttfm.kernels.proof.compile_case import DTYPES
from fasttfm.kernels.proof.ledger import Resources
from ptx_check.ledger.products import PRODUCTS, Product
from ptx_check.ledger.text_table import aligned

_MOVED = (
    (r"cross_entropy\.forward/loss", 1),
    (r"cross_entropy\.", 2),
    (r"embedding\.forward", 2),
    (r"embedding\.sum_rows", 1),
    (r"feed_forward\.activate", 2),
    (r"feed_forward\.gate/\d", 3),
    (r"feed_forward\.gate", 4),
    (r"layer_norm\.forward/.*residual", 4),
    (r"layer_norm\.forward", 2),
    (r"layer_norm\.backward/.*(ds|twice).*dropout", 5),
    (r"layer_norm\.backward/.*(ds|twice|dropout)", 4),
    (r"layer_norm\.backward", 3),
    (r"layer_norm\.column_sums", 2),
    (r"masked_softmax\.backward/.*cap", 4),
    (r"masked_softmax\.(forward/.*dropout|backward)", 3),
    (r"masked_softmax\.forward", 2),
    (r"partial_sums", 1),
    (r"residual_add", 3),
    (r"rotary", 4),
    (r"search\.embed", 2),
)
"""Beginning of a case's name -> tensors of its dtype of which an element of the tile is read or written; of rotary's
pairs both halves."""


_SHORT = re.compile(r"attention\.short\.(forward|backward)/.*/D(\d+)/(\d+)x(\d+)w(\d+)s\d+$")


@dataclass(frozen=True, slots=True)
class Share:
    product: Product
    case: str
    dtype: str
    instructions: float
    """Cycles of the busiest unit an element."""
    leaves: float
    """Cycles in which its bytes move."""

    @property
    def share(self) -> float:
        return self.instructions / self.leaves


def bytes_moved(name: str, dtype: str) -> float | None:
    """Bytes that must move for an element of a case's tile; None for a kernel that products bound."""
    if short := _SHORT.match(name):
        rows = 4 if short[1] == "forward" else 7  # of q, k, v and out; of q, k, v, dout, dq, dk and dv
        return rows * int(short[2]) * (4 if dtype == "tf32" else DTYPES[dtype]) / int(short[4])
    tensors = next((number for pattern, number in _MOVED if re.match(pattern, name)), None)
    if tensors is None:
        return None
    size = 4 if name.startswith("partial_sums") else DTYPES[dtype]
    wide = 2 if "fp32-residual" in name else 0  # the residual stream, read and written
    if name.startswith("masked_softmax"):  # scores, or the weights' gradient and a cap's scores
        wide = 1 + ("+cap" in name)
    return tensors * size + wide * (4 - size)


def shares(cases: Iterable[tuple[str, str, str, float]]) -> Iterator[Share]:
    """cases: chip, name, dtype, bound in cycles an element. Of every product with such a chip."""
    for chip, name, dtype, bound in cases:
        moved = bytes_moved(name, dtype)
        if moved is None or not bound:
            continue
        for product in PRODUCTS.values():
            if product.chip == chip:
                cycle = product.bandwidth / product.clock / product.schedulers  # bytes a cycle and scheduler
                yield Share(product, name, dtype, bound, moved * CHIPS[chip].warp / cycle)


def _cycles(chip: str, name: str, needs: Resources) -> float:
    """Cycles an element. A program of attention's backward pass over short rows goes once around its loop for each tile
    of queries; what it does outside of it, which is as much again, is taken at an instruction a cycle."""
    short = _SHORT.match(name)
    if not short or short[1] == "forward":
        return needs.bound
    _, _, _, keys, warps = short.groups()
    return needs.bound + needs.outside * int(warps) * CHIPS[chip].warp / int(keys) ** 2


def recorded() -> list[Share]:
    """The shares of all cases with a bound in budgets.csv, in order of their products."""
    _, known = budgets.read()
    order = list(PRODUCTS)
    bound = {key: _cycles(key[0], key[1], needs) for key, needs in known.items() if needs.bound and key[0] in CHIPS}
    found = shares((*key, cycles) for key, cycles in bound.items())
    return sorted(found, key=lambda each: (each.case, each.dtype, order.index(each.product.name)))


def table(rows: Iterable[Share] | None = None) -> str:
    """Table of the case with the largest share for every kernel, dtype and product."""
    worst: dict[tuple[str, str, str], Share] = {}
    for each in recorded() if rows is None else rows:
        key = (each.case.split("/")[0], each.dtype, each.product.name)
        if key not in worst or worst[key].share < each.share:
            worst[key] = each
    lines = [("kernel at its worst", "dtype", "product", "cycles an element", "bandwidth leaves", "share")]
    for each in worst.values():
        cycles = (f"{each.instructions:.1f}", f"{each.leaves:.1f}", f"{each.share:.0%}")
        lines.append((each.case, each.dtype, each.product.name, *cycles))
    return aligned(lines, names=3)
