"""Memory-bound kernels: compute cycles per element compared with the memory time per element.

    share = cycles per element of the busiest unit / cycles in which the memory moves the bytes of an element

Below 1 a kernel is memory-bound, if enough warps are resident. Bytes count every operand once. Cycles are those of the
loop over a row, or of the whole program if it has none. Attention of short rows is included, with as many queries as
its tile has keys; its elements are scores.
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
"""Pattern of a case name -> tensors of its dtype that are read or written per element of the tile; rotary: per pair."""

_SHORT = re.compile(r"attention\.short\.(forward|backward)/.*/D(\d+)/(\d+)x(\d+)w(\d+)s\d+$")


@dataclass(frozen=True, slots=True)
class Share:
    product: Product
    case: str
    dtype: str
    instructions: float
    """Cycles of the busiest unit per element."""
    leaves: float
    """Cycles in which the memory moves the bytes of an element."""

    @property
    def share(self) -> float:
        return self.instructions / self.leaves


def bytes_moved(name: str, dtype: str) -> float | None:
    """Bytes moved per element of a tile; None for a kernel bound by matrix products."""
    if short := _SHORT.match(name):
        rows = 4 if short[1] == "forward" else 7  # q, k, v, out; q, k, v, dout, dq, dk, dv
        return rows * int(short[2]) * (4 if dtype == "tf32" else DTYPES[dtype]) / int(short[4])
    tensors = next((number for pattern, number in _MOVED if re.match(pattern, name)), None)
    if tensors is None:
        return None
    size = 4 if name.startswith("partial_sums") else DTYPES[dtype]
    wide = 2 if "fp32-residual" in name else 0  # the residual stream, read and written
    if name.startswith("masked_softmax"):  # scores, or the gradient of the weights and the scores of a cap
        wide = 1 + ("+cap" in name)
    return tensors * size + wide * (4 - size)


def shares(cases: Iterable[tuple[str, str, str, float]]) -> Iterator[Share]:
    """The Share of every case (chip, name, dtype, bound in cycles per element) on every product with that chip."""
    for chip, name, dtype, bound in cases:
        moved = bytes_moved(name, dtype)
        if moved is None or not bound:
            continue
        for product in PRODUCTS.values():
            if product.chip == chip:
                cycle = product.bandwidth / product.clock / product.schedulers  # bytes per cycle and scheduler
                yield Share(product, name, dtype, bound, moved * CHIPS[chip].warp / cycle)


def _cycles(chip: str, name: str, needs: Resources) -> float:
    """Cycles per element. The backward pass of short attention has about as many instructions outside of its loop over
    tiles of queries as inside: they are added, at one per cycle."""
    short = _SHORT.match(name)
    if not short or short[1] == "forward":
        return needs.bound
    _, _, _, keys, warps = short.groups()
    return needs.bound + needs.outside * int(warps) * CHIPS[chip].warp / int(keys) ** 2


def recorded() -> list[Share]:
    """The shares of all cases with a bound in budgets.csv, sorted by case, dtype and product."""
    _, recorded = budgets.read()
    order = list(PRODUCTS)
    bounded = {key: needs for key, needs in recorded.items() if needs.bound and key[0] in CHIPS}
    result = shares((*key, _cycles(*key[:2], needs)) for key, needs in bounded.items())
    return sorted(result, key=lambda each: (each.case, each.dtype, order.index(each.product.name)))


def table(rows: Iterable[Share] | None = None) -> str:
    """Table of the case with the largest share of every kernel, dtype and product."""
    worst: dict[tuple[str, str, str], Share] = {}
    for each in recorded() if rows is None else rows:
        key = (each.case.split("/")[0], each.dtype, each.product.name)
        if key not in worst or worst[key].share < each.share:
            worst[key] = each
    lines = [("kernel at its worst", "dtype", "product", "cycles per element", "bandwidth leaves", "share")]
    for each in worst.values():
        cycles = (f"{each.instructions:.1f}", f"{each.leaves:.1f}", f"{each.share:.0%}")
        lines.append((each.case, each.dtype, each.product.name, *cycles))
    return aligned(lines, names=3)
