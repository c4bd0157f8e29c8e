"""Random walks through states that a seed fixes, many at a time: what subword sampling draws segmentations by.

A draw from a state's outcomes is a few array look-ups (the alias method, Walker 1977), and the random numbers are
hashes of a walk's key and its step.
"""

import itertools
from array import array
from collections.abc import Callable

import numpy as np

END, UNBUILT = -1, -2  # in place of a state: the walk is over; the state is built when a walk first comes to it
GOLDEN = 0x9E3779B97F4A7C15


class States:
    """Draws that can happen in each state, in arrays, and walks through them.

    Outcomes of a state are neighbours in `accept`, `other`, `following` and `emits`: the state that comes then and the
    emission, a short list of ids, that is put out on the way (-1: none).
    """

    def __init__(self, vocabulary: int) -> None:
        self.first, self.count = array("i"), array("i")
        self.accept, self.other = array("d"), array("i")
        self.following, self.emits = array("i"), array("i")
        # emission i is the piece i alone, for all pieces
        self.ids, self.ids_first = array("i", range(vocabulary)), array("i", range(vocabulary + 1))

    @property
    def size(self) -> int:
        return len(self.accept) + len(self.ids)

    def add(self, table: tuple[list[float], list[int]], following: list[int], emits: list[int]) -> int:
        """A new state; returns its number."""
        begin = len(self.accept)
        self.first.append(begin)
        self.count.append(len(following))
        self.accept.extend(table[0])
        self.other.extend(table[1])
        self.following.extend(following)
        self.emits.extend(emits)
        return len(self.first) - 1

    def emission(self, ids: list[int]) -> int:
        """A new emission; returns its number."""
        self.ids.extend(ids)
        self.ids_first.append(len(self.ids))
        return len(self.ids_first) - 2

    def walk(
        self,
        nodes: np.ndarray,
        keys: np.ndarray,
        drawn: dict[int, list[int]],
        build: Callable[[int, int, np.uint64, int], int | list[int]],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Walk from each state (those below 0 are left out) to the end: emissions in the order of the steps, and whose.

        keys: of each walk, (len(nodes),) uint64. build(state, outcome, key, steps) gives the state that
        comes then, or all that the walk puts out in the end, which goes to `drawn`.
        """
        walks = np.flatnonzero(nodes >= 0)
        nodes, keys = nodes[walks], keys[walks]
        emitted, whose = [], []
        for step in itertools.count(1):
            if not len(walks):
                break
            outcomes = self._draw(nodes, mix(keys + np.uint64(step * GOLDEN % (1 << 64))))
            following = np.frombuffer(self.following, np.int32)[outcomes]
            for position in np.flatnonzero(following == UNBUILT).tolist():
                outcome, node = int(outcomes[position]), int(nodes[position])
                if self.following[outcome] == UNBUILT:
                    comes = build(node, outcome - self.first[node], keys[position], step)
                    if isinstance(comes, list):
                        drawn[int(walks[position])] = comes
                        continue
                    self.following[outcome] = comes
                following[position] = self.following[outcome]
            emissions = np.frombuffer(self.emits, np.int32)[outcomes]
            put_out = emissions >= 0
            emitted.append(emissions[put_out])
            whose.append(walks[put_out])
            goes_on = following >= 0
            walks, nodes, keys = walks[goes_on], following[goes_on].astype(np.int64), keys[goes_on]
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty, *emitted]), np.concatenate([empty, *whose])

    def _draw(self, nodes: np.ndarray, random: np.ndarray) -> np.ndarray:
        scaled = uniform(random) * np.frombuffer(self.count, np.int32)[nodes]
        column = scaled.astype(np.int64)
        outcomes = np.frombuffer(self.first, np.int32)[nodes] + column
        return np.where(
            scaled - column < np.frombuffer(self.accept, np.float64)[outcomes],
            outcomes,
            outcomes - column + np.frombuffer(self.other, np.int32)[outcomes],
        )

    def emitted(self, emissions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of emissions, one after the other, and how many each has."""
        firsts = np.frombuffer(self.ids_first, np.int32)
        begin, counts = firsts[emissions].astype(np.int64), np.diff(firsts)[emissions].astype(np.int64)
        indices = np.arange(counts.sum()) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
        return np.frombuffer(self.ids, np.int32)[indices].astype(np.int64), counts


def alias_table(probabilities: list[float]) -> tuple[list[float], list[int]]:
    """Walker's table: draw a column evenly and take it with probability accept[column], else other[column]."""
    count = len(probabilities)
    accept = [each * count for each in probabilities]
    other = list(range(count))
    small = [position for position, each in enumerate(accept) if each < 1]
    large = [position for position, each in enumerate(accept) if each >= 1]
    while small and large:
        low, high = small.pop(), large[-1]
        other[low] = high
        accept[high] -= 1 - accept[low]
        if accept[high] < 1:
            small.append(large.pop())
    for position in small + large:  # 1 but for rounding
        accept[position] = 1.0
    return accept, other


def mix(numbers: np.ndarray) -> np.ndarray:
    """splitmix64's hash (Steele et al. 2014) of uint64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def uniform(numbers: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) of random uint64."""
    return (numbers >> np.uint64(11)) * 2.0**-53
