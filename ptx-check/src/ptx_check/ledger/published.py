"""Published times of known kernels beside the bound that the ledger counts: which share of it such kernels reach.

    share = cycles of the bound / cycles that the published rate comes to, at the boost clock

A share tells how near a well-made kernel of this kind comes to its busiest unit on a device, which is what predictions
for kernels that no device has run assume. Rates are the named source's. Bounds are counted from the machine code of
FlashAttention's wheels and of the tutorial by `--peer` and `ledger FILE`; docs/ledger.md has the commands.
"""

from dataclasses import dataclass

from ptx_check.ledger.gcn import warp
from ptx_check.ledger.products import PRODUCTS
from ptx_check.ledger.text_table import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A measured rate of somebody's attention kernel, and what its inner loop was counted to need."""

    kernel: str
    product: str
    width: int
    """Head size."""
    products: int
    """Matrix products of rows by columns by head size: 2 forward, 5 backward (7 in two kernels)."""
    tflops: float
    """TFLOP/s, two a multiply-add of these products."""
    bound: float
    """Cycles of a scheduler for a score element of a thread, as the ledger counts the loop."""
    source: str

    @property
    def cycles(self) -> float:
        """Cycles of a scheduler for a score element of a thread that the rate comes to."""
        product = PRODUCTS[self.product]
        flops = 2 * self.products * self.width * warp(product.chip)
        return flops * product.schedulers * product.clock * 1e9 / (self.tflops * 1e12)

    @property
    def share(self) -> float:
        return self.bound / self.cycles


_FA2 = "Dao 2023, FlashAttention-2 (arXiv:2307.08691)"
_FA3 = "Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608)"
PUBLISHED = (
    Published(kernel="FlashAttention-2 forward", product="A100", width=128, products=2, tflops=228, bound=32.0,
              source=f"{_FA2}: up to 73% of 312 TFLOP/s"),
    Published(kernel="FlashAttention-2 backward", product="A100", width=128, products=5, tflops=196, bound=80.0,
              source=f"{_FA2}: up to 63% of 312 TFLOP/s"),
    Published(kernel="FlashAttention-2 forward", product="H100", width=128, products=2, tflops=346, bound=16.0,
              source=f"{_FA3}, abstract: 35% of 989 TFLOP/s"),
    Published(kernel="FlashAttention-3 forward", product="H100", width=128, products=2, tflops=661, bound=16.0,
              source=f"{_FA3}, table of the ablation: 16 heads, 4 x 8,448 keys"),
    Published(kernel="Triton's tutorial 06 forward", product="A100", width=64, products=2, tflops=167, bound=16.0,
              source="triton-lang.org, tutorial 06: 16k keys; it names no GPU, an A100's rates are taken"),
)  # fmt: skip
"""Rates as published, bounds as counted: of the kernel that was measured, or of a later build of it."""


def reached() -> float:
    """The median share: what a prediction assumes of a loop that a unit bounds."""
    shares = sorted(each.share for each in PUBLISHED)
    return shares[len(shares) // 2]


def table() -> str:
    lines = [("kernel", "product", "source", "width", "TFLOP/s", "cycles an element", "bound", "share")]
    for each in PUBLISHED:
        numbers = (f"{each.tflops:.0f}", f"{each.cycles:.1f}", f"{each.bound:.1f}", f"{each.share:.0%}")
        lines.append((each.kernel, each.product, each.source, str(each.width), *numbers))
    return aligned(lines, names=3) + f"\n\nThe median share is {reached():.0%}."
