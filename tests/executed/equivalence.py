"""Proofs that a mutation changes nothing, by following every path through the kernel from the mutated place.

Each proof takes the PTX before and after the removed instruction.
"""

import re
from collections.abc import Callable

from ptx_check.control import LEAVING, is_asynchronous, results_and_sources, successors
from ptx_check.parse import Instruction, parse

Judge = Callable[[Instruction], bool]
_TOUCHING = re.compile(r"^\s*(?:@!?%p\d+ )?((?:bar|cp\.async|wgmma|ld\.shared|st\.shared|ldmatrix|stmatrix)\S*)", re.M)
"""Instructions that access shared memory or synchronize accesses."""


class Flow:
    """The control flow graph of a kernel by instructions."""

    def __init__(self, before: str, removed: str, after: str) -> None:
        kernel = parse(before + removed + after)
        blocks = [_reached(block.instructions) for block in kernel.blocks]
        self.instructions = [i for block in blocks for i in block]
        starts = [sum(map(len, blocks[:number])) for number in range(len(blocks) + 1)]
        self.after: list[list[int]] = [[place + 1] for place in range(len(self.instructions))]
        for number, following in enumerate(successors(kernel)):
            if blocks[number]:
                self.after[starts[number + 1] - 1] = [starts[block] for block in following]
        self.before: list[list[int]] = [[] for _ in self.instructions]
        for place, following in enumerate(self.after):
            for each in following:
                if each < len(self.instructions):
                    self.before[each].append(place)
        line = before.count("\n") + 1
        self.place = next(p for p, i in enumerate(self.instructions) if i.location.line == line)

    def meets(self, steps: list[list[int]], stop: Judge, bad: Judge) -> bool:
        """True if some path from the place, ending at `stop`, contains a bad instruction."""
        ways, seen = list(steps[self.place]), set()
        while ways:
            place = ways.pop()
            if place in seen or place >= len(self.instructions):
                continue
            seen.add(place)
            instruction = self.instructions[place]
            removed = place == self.place
            if not removed and bad(instruction):
                return True
            if removed or not stop(instruction):
                ways += steps[place]
        return False


def _reached(instructions: list[Instruction]) -> list[Instruction]:
    end = next((p for p, i in enumerate(instructions) if i.words[0] in LEAVING), len(instructions))
    return instructions[: end + 1]


def _named(i: Instruction) -> set[str]:
    return {r.name for registers in results_and_sources(i) for r in registers}


def _product(i: Instruction) -> bool:
    return is_asynchronous(i)


def waits_again(before: str, after: str) -> bool:
    """wgmma.wait_group: on every path a wait for all products follows before their sums are used.

    Overwriting the operands of a pending product is a race, which the machine detects at every barrier before the wait
    (Groups.remember).
    """
    flow = Flow(before, "wgmma.wait_group.sync.aligned 0;", after)
    sums = {r.name for i in flow.instructions if "mma_async" in i.opcode for r in i.operands[0].parts}
    copies = [_named(i) for i in flow.instructions if i.words[0] == "mov"]
    while more := {name for pair in copies if pair & sums for name in pair} - sums:
        sums |= more

    def waits(i: Instruction) -> bool:
        return i.opcode.startswith("wgmma.wait_group") and i.operands[0].value == 0

    def used(i: Instruction) -> bool:
        return i.words[0] not in ("mov", "wgmma") and bool(_named(i) & sums)

    return not flow.meets(flow.after, waits, used) and flow.meets(flow.after, lambda i: False, waits)


def fenced_again(before: str, after: str) -> bool:
    """fence.proxy.async: on every path another fence comes before the next product, or shared memory has not been
    written since the previous fence."""
    flow = Flow(before, "fence.proxy.async.shared::cta;", after)

    def fences(i: Instruction) -> bool:
        return i.opcode.startswith("fence.proxy.async")

    def writes(i: Instruction) -> bool:
        return i.opcode.startswith(("st.shared", "stmatrix", "cp.async.wait"))

    return not flow.meets(flow.after, fences, _product) or not flow.meets(flow.before, fences, writes)


def untouched(before: str, after: str) -> bool:
    """wgmma.fence: every path to it contains another one, after which no register of the next products is touched."""
    flow = Flow(before, "wgmma.fence.sync.aligned;", after)
    taken: set[str] = set()

    def fences(i: Instruction) -> bool:
        return i.opcode.startswith("wgmma.fence")

    def collected(i: Instruction) -> bool:
        taken.update(_named(i) if _product(i) else ())
        return False

    def touched(i: Instruction) -> bool:
        begins = i is flow.instructions[0] and not fences(i)
        return begins or (not _product(i) and bool(_named(i) & taken))

    flow.meets(flow.after, fences, collected)
    return flow.place > 0 and not flow.meets(flow.before, fences, touched)


def orders_nothing(before: str, after: str) -> bool:
    """bar.sync between the last product of a loop and the copies of a later iteration into another buffer.

    That buffer was read in an earlier iteration, last by its last product, which every warp has waited for in this
    iteration (wgmma.wait_group 0 before the first use of the sums), followed by at least one barrier. Nothing else is
    accessed between this barrier and its neighbours.
    """
    label = before.rfind("\n$L__BB")
    round_ = before[label:]
    waited = round_.find("wgmma.wait_group.sync.aligned 0;")
    earlier, following = _TOUCHING.findall(before), _TOUCHING.search(after)
    committed = bool(earlier) and earlier[-1].startswith("wgmma.commit_group")
    around = committed and following is not None and following[1].startswith("cp.async.c")
    return around and waited >= 0 and "bar.sync" in round_[waited:]


def next_to_another(before: str, after: str) -> bool:
    """bar.sync next to another one, with no memory access on any path between the two."""
    flow = Flow(before, "bar.sync 0;", after)

    def barrier(i: Instruction) -> bool:
        return i.words[0] == "bar" and i.words[1] == "sync"

    def touches(i: Instruction) -> bool:
        plain = i.words[0] in ("ld", "st", "atom", "red") and i.words[1] != "param"
        return plain or i.words[0] in ("cp", "ldmatrix", "stmatrix", "wgmma", "tcgen05", "mbarrier", "fence")

    return not flow.meets(flow.after, barrier, touches) or not flow.meets(flow.before, barrier, touches)


def needless(before: str, after: str) -> bool:
    """bar.sync, by either proof."""
    return orders_nothing(before, after) or next_to_another(before, after)


def stores_waited_again(before: str, after: str) -> bool:
    """tcgen05.wait::st: on every path another one follows before a product and before the end of the kernel.

    Other readers, by tcgen05.ld, are checked by the machine against every pending store.
    """
    flow = Flow(before, "tcgen05.wait::st.sync.aligned;", after)

    def waits(i: Instruction) -> bool:
        return i.opcode.startswith("tcgen05.wait::st")

    def ends(i: Instruction) -> bool:
        return i.opcode.startswith("tcgen05.mma") or i.words[0] in ("ret", "exit")

    return not flow.meets(flow.after, waits, ends)


EQUIVALENT = {
    "a group fewer waited for": waits_again,
    "wait for products removed": waits_again,
    "fence of proxies removed": fenced_again,
    "fence of registers removed": untouched,
    "barrier removed": needless,
    "wait for stores in tensor memory removed": stores_waited_again,
}
"""Kind of mutation -> its proof."""
