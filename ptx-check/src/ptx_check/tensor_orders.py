"""Order of accesses to tensor memory in a warp-specialized kernel, by the clocks of orders.py.

A warp must be ordered after the products into what it loads or stores, and after those that read what it stores: it has
waited at the mbarrier of their tcgen05.commit, or met a warp that has. A product must be issued by a warp that is
ordered after the accesses of all warps to its sums, and after their stores to its left operand. Warps with the same
quarter of the lanes must be ordered with each other's stores.
"""

import numpy as np

_UNWAITED = "what is stored in tensor memory is used before tcgen05.wait::st"


class TensorOrders:
    """Accesses to one program's tensor memory, each table (warps, 2, columns): lower and upper halves of quarters."""

    def __init__(self, run, columns: int) -> None:
        self.run, self.warps = run, run.width // 32
        shape = (self.warps, 2, columns)
        self.loads, self.stores = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        """Clock of each warp at its last access; 0: none."""
        self.storing = np.zeros(shape, dtype=bool)
        """Stores until tcgen05.wait::st."""
        self.sums, self.reading = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        """Clock that a warp's last product into, or from, each column ends with; 0: none."""

    def access(self, index, mask, touched, *, stores: bool) -> None:
        """Record loads or stores of the columns `touched` (2, columns) by the warps of the threads in `mask`."""
        clocks = self.run.orders.clocks
        for warp in np.flatnonzero(self.run.spread(mask)[0, ::32]):
            here, others = clocks[warp, : self.warps, None, None], np.arange(self.warps) % 4 == warp % 4
            products = np.maximum(self.sums, self.reading) if stores else self.sums
            if (products > clocks[warp, self.warps : 2 * self.warps, None, None])[:, touched].any():
                message = "tensor memory of a product is used before the mbarrier of its tcgen05.commit is waited for"
                self.run.fault("unwritten", index, message)
            unwaited = self.storing[others & (np.arange(self.warps) != warp)] if stores else self.storing[others]
            if unwaited[:, touched].any():
                self.run.fault("unwritten", index, _UNWAITED)
            before = np.maximum(self.loads, self.stores) if stores else self.stores
            if (before > here)[others][:, touched].any():
                message = "tensor memory is touched by two warps with nothing between that orders them"
                self.run.fault("race", index, message)
            (self.stores if stores else self.loads)[warp, touched] = clocks[warp, warp]
            if stores:
                self.storing[warp, touched] = True

    def wait(self) -> None:
        """Execute tcgen05.wait::st."""
        self.storing[self.run.orders.here()] = False

    def product(self, index, warp: int, sides: slice, columns: slice, ends: int, *, reads: bool) -> None:
        """Record a product of a warp into columns, or from them (reads), which completes with commit `ends`."""
        clocks, area = self.run.orders.clocks[warp], (slice(None), sides, columns)
        if self.storing[area].any():
            self.run.fault("unwritten", index, _UNWAITED)
        touched = self.stores if reads else np.maximum(self.loads, self.stores)
        products = self.sums if reads else np.maximum(self.sums, self.reading)
        products = np.where(np.arange(self.warps)[:, None, None] == warp, 0, products)  # its own run in order
        late = touched[area] > clocks[: self.warps, None, None]
        late |= products[area] > clocks[self.warps : 2 * self.warps, None, None]
        if late.any():
            message = "a tensor product takes tensor memory that others touched with nothing between that orders them"
            self.run.fault("race", index, message)
        (self.reading if reads else self.sums)[warp, sides, columns] = ends + 1
