"""Products, and the chips that they have: clock, processors and bandwidth, as their vendors print them.

Clocks are boost clocks; where a vendor prints a tensor rate, the clock that goes with it, which is what makes that rate
and the lanes of units.py agree.
"""

from dataclasses import dataclass

from ptx_check.ledger import gcn, units


@dataclass(frozen=True, slots=True)
class Product:
    name: str
    chip: str
    processors: int
    """Streaming multiprocessors or compute units."""
    clock: float
    """GHz."""
    bandwidth: float
    """GB/s between the chip and its memory."""

    @property
    def schedulers(self) -> int:
        """The warp schedulers of all its processors."""
        of = gcn.RATES[self.chip].simds if self.chip in gcn.RATES else units.RATES[self.chip].schedulers
        return self.processors * of

    def seconds(self, cycles: float, warps: float) -> float:
        """The least time in which as many warps, spread evenly, can take so many cycles of their scheduler each."""
        return cycles * warps / (self.schedulers * self.clock * 1e9)


PRODUCTS: dict[str, Product] = {
    product.name: product
    for product in (
        Product("P100", "sm_60", 56, 1.48, 732),
        Product("V100", "sm_70", 80, 1.53, 900),
        Product("T4", "sm_75", 40, 1.59, 320),
        Product("A100", "sm_80", 108, 1.41, 2039),
        Product("RTX 3090", "sm_86", 82, 1.695, 936),
        Product("RTX 4090", "sm_89", 128, 2.52, 1008),
        Product("H100", "sm_90", 132, 1.83, 3350),
        Product("H200", "sm_90", 132, 1.83, 4800),
        Product("B200", "sm_100", 148, 1.86, 8000),
        Product("RTX 5090", "sm_120", 170, 2.41, 1792),
        Product("MI250X die", "gfx90a", 110, 1.7, 1638),
        Product("MI300X", "gfx942", 304, 2.1, 5300),
        Product("MI355X", "gfx950", 256, 2.4, 8000),
    )
}
"""By name."""
