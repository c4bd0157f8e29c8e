"""Published rates of attention kernels compared with the ledger's bound.

    share = cycles of the bound / cycles of the published rate at the boost clock

The share is how close a well-tuned kernel comes to the limit of its busiest unit on a device. Predictions for kernels
that have not run on a device assume the median share. Rates are those of the named source. Bounds are counted from the
machine code of FlashAttention's wheels and of Triton's tutorial with `--peer` and `ledger FILE`; docs/ledger.md has the
commands.
"""

from dataclasses import dataclass

from ptx_check.ledger.gcn import warp
from ptx_check.ledger.products import PRODUCTS
from ptx_check.ledger.text_table import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published rate of an attention kernel, and the counted bound of its inner loop."""

    kernel: str
    product: str
    width: int
    """Head dim."""
    products: int
    """Matrix products of size rows x columns x head dim: 2 forward, 5 backward (7 in two kernels)."""
    tflops: float
    """TFLOP/s of these products, two FLOPs per multiply-add."""
    bound: float
    """Counted bound: cycles of a scheduler per score of a thread."""
    source: str

    @property
    def cycles(self) -> float:
        """Cycles of a scheduler per score of a thread at the published rate."""
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
"""Published rates and counted bounds. A bound is that of the measured kernel or of a later build of it."""


def reached() -> float:
    """Return the median share, which predictions assume for a loop bound by a unit."""
    shares = sorted(each.share for each in PUBLISHED)
    return shares[len(shares) // 2]


def table() -> str:
    lines = [("kernel", "product", "source", "width", "TFLOP/s", "cycles an element", "bound", "share")]
    for each in PUBLISHED:
        numbers = (f"{each.tflops:.0f}", f"{each.cycles:.1f}", f"{each.bound:.1f}", f"{each.share:.0%}")
        lines.append((each.kernel, each.product, each.source, str(each.width), *numbers))
    return aligned(lines, names=3) + f"\n\nThe median share is {reached():.0%}."
