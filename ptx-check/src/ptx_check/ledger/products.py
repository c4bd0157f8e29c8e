"""GPU products: chip, clock, number of processors and memory bandwidth, as published by the vendors.

Clocks are boost clocks. If the vendor publishes a tensor rate, the clock is the one behind that rate, so that it agrees
with the rates in units.py.
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
    """Memory bandwidth in GB/s."""

    @property
    def schedulers(self) -> int:
        """Warp schedulers (AMD: SIMDs) of all processors."""
        of = gcn.RATES[self.chip].simds if self.chip in gcn.RATES else units.RATES[self.chip].schedulers
        return self.processors * of

    def seconds(self, cycles: float, warps: float) -> float:
        """Return the lower bound on the time of `warps` evenly distributed warps that need `cycles` each."""
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
