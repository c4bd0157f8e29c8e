"""Race detection in shared memory between warp teams, by vector clocks.

Agents access shared memory: warps, the products and tile stores of each warp, and copies, which count as accesses of
their mbarrier. The clock of a warp has, per agent, the last event that the warp is ordered after. A barrier joins the
clocks of its threads; an arrival at an mbarrier passes the warp's clock to the warps that wait for the phase; a wait
for products or stores orders the warp after them. An access is a race if its warp is not ordered after an earlier
conflicting access. Threads of a warp are ordered by barriers and bar.warp.sync.
Source: Flanagan and Freund 2009, "FastTrack", section 3.
"""

import numpy as np

from ptx_check.memory import spread

_THREAD, _EPOCH = 0x3FF, 10
_UNFENCED = "a product or copy takes what threads wrote into shared memory with no fence.proxy.async between"


class Orders:
    """Accesses to one program's shared memory, and the warps' clocks."""

    met = False

    def __init__(self, run, size: int, grain: int, mbarriers: int) -> None:
        self.run, self.grain, self.cells = run, grain, -(-size // 16) * 16 // grain
        warps = self.warps = run.width // 32
        self.clocks = np.zeros((warps, 3 * warps + mbarriers), np.int64)
        """Clock of each warp over warps, products, stores and mbarriers."""
        self.clocks[np.arange(warps), np.arange(warps)] = 1
        self.told = np.zeros((mbarriers, self.clocks.shape[1]), np.int64)
        """Clock accumulated by each mbarrier; `ended`: its value when the last phase completed."""
        self.ended = np.zeros_like(self.told)
        self.writer, self.epoch, self.code, self.fence_of, self.by = (np.zeros(self.cells, np.int64) for _ in range(5))
        """Last writer: agent, its clock (0: never), thread, fences passed, instruction."""
        self.reads: dict[int, np.ndarray] = {}
        """Agent -> its last read of each cell (2, cells): clock and instruction."""
        self.reader = np.zeros(self.cells, np.int64)
        """Last reading thread and its warp barriers passed; 0: none."""
        self.fences = np.ones(warps, np.int64)

    # ------------------------------------------------------------------------------------------------------ accesses

    def read(self, index, address, mask, width, code=None) -> None:
        slots, span, codes = self.chosen(address, mask, width, code)
        warps = (codes & _THREAD) >> 5
        self.after_writes(index, slots, span, warps, codes, "written and read")
        for warp in np.unique(warps):
            self.note(int(warp), slots[warps == warp], span, self.clocks[warp, warp], index)
        self.reader.reshape(-1, span)[slots] = codes[:, None] + 1

    exchange = read

    def write(self, index, address, mask, width, code=None) -> None:
        slots, span, codes = self.chosen(address, mask, width, code)
        warps = (codes & _THREAD) >> 5
        self.after_writes(index, slots, span, warps, codes, "written twice")
        self.after_reads(index, slots, span, warps, codes)
        self.put(slots, span, warps, self.clocks[warps, warps], codes, self.fences[warps], index)

    def product(self, index, address, mask, width, group, issuer: int | None = None) -> None:
        """Record a product of a warp (None: the running ones), which reads addresses until `group` is waited for."""
        slots, span = self.slots(address, width)
        for warp in self.here() if issuer is None else (issuer,):
            self.after_writes(index, slots, span, np.full(len(slots), warp), None, "written and read")
            self.note(self.warps + warp, slots, span, group + 1, index)
        self.after_fence(index, slots, span)

    def storing(self, index, address, mask, width, group, warp) -> None:
        """Record a tile store of a warp, which reads shared memory until `group` is waited for."""
        slots, span = self.slots(address, width)
        self.after_writes(index, slots, span, np.full(len(slots), warp), None, "written and read")
        self.after_fence(index, slots, span)
        self.note(2 * self.warps + warp, slots, span, group + 1, index)

    def copying(self, index, address, mask, width, warp, place, phase) -> None:
        """Record a copy into shared memory issued by a warp, which arrives when an mbarrier's phase completes."""
        slots, span = self.slots(address, width)
        warps = np.full(len(slots), warp)
        self.after_writes(index, slots, span, warps, None, "written twice")
        self.after_reads(index, slots, span, warps, None)
        self.put(slots, span, 3 * self.warps + place, phase + 1, 0, 0, index)

    def slots(self, address, width) -> tuple[np.ndarray, int]:
        """Return the index of each word of `width` bytes, and the cells per word."""
        span = max(1, width // self.grain)
        places = (address // np.uint32(max(width, self.grain))).astype(np.int64).ravel()
        return np.minimum(places, self.cells // span - 1), span

    def chosen(self, address, mask, width, code):
        code = self.run.code if code is None else code
        shape = np.broadcast_shapes(address.shape, code.shape, (1, 1) if mask is None else mask.shape)
        address, code = spread(address, shape), spread(code, shape)
        if mask is not None:
            taken = spread(mask, shape)
            address, code = address[taken], code[taken]
        return *self.slots(address, width), code.ravel()

    def note(self, agent: int, slots, span: int, when, index) -> None:
        if agent not in self.reads:
            self.reads[agent] = np.zeros((2, self.cells), np.int64)
        for row, value in zip(self.reads[agent], (when, index)):
            row.reshape(-1, span)[slots] = value

    def put(self, slots, span, *values) -> None:
        agents, epochs, codes, fences, index = (np.asarray(each) for each in values)
        tables = (self.writer, self.epoch, self.code, self.fence_of, self.by)
        for table, value in zip(tables, (agents, epochs, codes, fences, index)):
            table.reshape(-1, span)[slots] = value[..., None] if value.ndim else value
        for table in self.reads.values():
            table[0].reshape(-1, span)[slots] = 0
        self.reader.reshape(-1, span)[slots] = 0

    def after_writes(self, index, slots, span, warps, codes, what) -> None:
        """Check that these warps are ordered after the last writes. codes: thread codes; None: asynchronous."""
        writer, epoch, code = (t.reshape(-1, span)[slots] for t in (self.writer, self.epoch, self.code))
        wrong = self.clocks[warps[:, None], writer] < epoch
        if codes is not None:
            wrong |= (epoch != 0) & (writer == warps[:, None]) & _unmet(code, codes[:, None])
        if wrong.any():
            self.report(index, slots, span, wrong, self.by.reshape(-1, span)[slots], what)

    def after_reads(self, index, slots, span, warps, codes) -> None:
        for agent, table in self.reads.items():
            when = table[0].reshape(-1, span)[slots]
            wrong = self.clocks[warps, agent][:, None] < when
            if codes is not None and agent < self.warps:
                reader = self.reader.reshape(-1, span)[slots] - 1
                same = (when != 0) & (reader >= 0) & ((reader & _THREAD) >> 5 == agent) & (warps[:, None] == agent)
                wrong |= same & _unmet(reader, codes[:, None])
            if wrong.any():
                self.report(index, slots, span, wrong, table[1].reshape(-1, span)[slots], "read and written")

    def after_fence(self, index, slots, span) -> None:
        """Report unfenced writes by threads: products and copies may read the old values."""
        writer, epoch, fence = (t.reshape(-1, span)[slots] for t in (self.writer, self.epoch, self.fence_of))
        threads = (epoch != 0) & (writer < self.warps)
        wrong = threads & (self.fences[np.where(threads, writer, 0)] == fence)
        if wrong.any():
            self.run.fault("fence", index, _UNFENCED, int(self.by.reshape(-1, span)[slots][wrong][0]))

    def initialised(self, index, word: int) -> None:
        """Check that the mbarrier in this 8-byte word was fenced before a copy arrives there."""
        self.after_fence(index, np.array([word]), 8 // self.grain)

    def report(self, index, slots, span, wrong, others, what) -> None:
        byte = int((slots[:, None] * span + np.arange(span))[wrong][0]) * self.grain
        message = f"shared memory at byte {byte} is {what} with nothing between that orders them"
        self.run.fault("race", index, message, int(others[wrong][0]))

    # --------------------------------------------------------------------------------------------- what orders them

    def here(self) -> np.ndarray:
        return _warps_of(self.run.everyone())

    def fence(self) -> None:
        self.fences[self.here()] += 1

    def finished(self, group: int) -> None:
        """Order the running warps after their products before `group`."""
        warps = self.here()
        self.clocks[warps, self.warps + warps] = group

    def stored(self, mask, group: int) -> None:
        """Order the warps of these threads after their stores before `group`."""
        warps = np.flatnonzero(
            self.run.spread(np.ones((1, 1), dtype=bool) if mask is None else mask)[0].reshape(-1, 32).any(1)
        )
        self.clocks[warps, 2 * self.warps + warps] = group

    def meet(self, threads: np.ndarray) -> None:
        """Join the clocks of the warps of threads that meet at a barrier."""
        warps = _warps_of(threads)
        self.clocks[warps] = self.clocks[warps].max(0)
        self.clocks[warps, warps] += 1

    def arrive(self, place: int, threads: np.ndarray, commit: int) -> None:
        """Record the arrival of threads, or of a thread's tcgen05.commit, once its products up to it are complete."""
        warps = _warps_of(threads)
        self.told[place] = np.maximum(self.told[place], self.clocks[warps].max(0))
        if commit:
            self.told[place, self.warps + warps] = commit + 1
        self.clocks[warps, warps] += 1

    def turn(self, place: int, phase: int) -> None:
        """Record that an mbarrier has completed its phases below `phase`."""
        self.told[place, 3 * self.warps + place] = phase
        self.ended[place] = self.told[place]

    def acquire(self, place: int) -> None:
        """Order the running warps after the last completed phase of an mbarrier."""
        warps = self.here()
        self.clocks[warps] = np.maximum(self.clocks[warps], self.ended[place])

    def forget(self, code) -> bool:
        return False

    def barrier(self, arrived) -> None:
        """Nothing to do: accesses are compared as they are made."""


def _warps_of(threads: np.ndarray) -> np.ndarray:
    return np.flatnonzero(threads[0].reshape(-1, 32).any(1))


def _unmet(one, other):
    """Whether two thread codes (thread, warp barriers passed << 10) of one warp are unordered."""
    return ((one ^ other) & _THREAD != 0) & ((one ^ other) >> _EPOCH == 0)
