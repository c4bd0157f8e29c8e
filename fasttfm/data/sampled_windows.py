"""Work on a window of pairs with subword sampling: segmentations, and batches of like length of them.

A function of the window alone, for processes that have the vocabularies and nothing else.
"""

import math
from dataclasses import dataclass

import numpy as np

from fasttfm.data.sampling import SubwordSampler
from fasttfm.data.shapes import plan_batches
from fasttfm.data.tokenizer import Tokenizer

_THINNED = (1, 2, 3, 4, 6, 8)
"""A window may leave out sizes: it takes every one, every second one, and so on."""
_GIVEN_UP = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Where the segmentations of a window do not fit into its batches, this share of the pairs, those that grew most, keeps
SentencePiece's own."""

Sentences = list[np.ndarray]
Places = tuple[np.ndarray, np.ndarray]
"""A batch: places of its pairs in their window (B,), and what source and target are padded to (2,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Pairs that are to be drawn and packed together."""

    sides: tuple[Sentences, Sentences]
    """The ids of sources and targets that SentencePiece gives, pair by pair."""
    keys: tuple[np.ndarray, np.ndarray]
    """sampling.sentence_keys of each side."""
    planned: list[Places]
    """The batches by which it was planned; it will have as many."""
    sizes: np.ndarray
    """(K, 2): what batches may be padded to; the last holds everything."""
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A window's segmentations and batches."""

    sides: tuple[Sentences, Sentences]
    batches: list[Places]


class PairSampler:
    """Draws segmentations of pairs."""

    def __init__(self, tokenizers: tuple[Tokenizer, Tokenizer], amount: float) -> None:
        """tokenizers: of source and target. amount and errors: as SubwordSampler."""
        source = SubwordSampler(tokenizers[0], amount)
        joint = tokenizers[1] is tokenizers[0]
        self._samplers = source, source if joint else SubwordSampler(tokenizers[1], amount)

    def draw(
        self, sides: tuple[Sentences, Sentences], keys: tuple[np.ndarray, np.ndarray]
    ) -> tuple[Sentences, Sentences]:
        """A segmentation of each source and target."""
        source, target = self._samplers
        return source.sample(sides[0], keys[0]), target.sample(sides[1], keys[1])

    def pack(self, window: Window) -> Packed:
        """Draw a window's segmentations and put its pairs into batches of like length by these."""
        drawn = self.draw(window.sides, window.keys)
        pairs = len(drawn[0])
        lengths = np.array([[len(ids) for ids in side] for sides in (drawn, window.sides) for side in sides])  # (4, n)
        growth = np.where(lengths[:2].max(axis=0) < window.max_tokens, (lengths[:2] - lengths[2:]).sum(axis=0), np.inf)
        most_grown = np.argsort(-growth, kind="stable")
        for share in _GIVEN_UP:
            stays = np.zeros(pairs, dtype=bool)
            stays[most_grown[: max(math.ceil(share * pairs), int(np.isinf(growth).sum()))]] = True
            widths = np.where(stays, lengths[2:], lengths[:2]) + 1
            batches = _pack(widths[0], widths[1], window.sizes, window.max_tokens, len(window.planned))
            if batches is not None:
                source, target = (
                    [old if keep else new for new, old, keep in zip(*each, stays)] for each in zip(drawn, window.sides)
                )
                return Packed(sides=(source, target), batches=batches)
        return Packed(sides=window.sides, batches=window.planned)  # SentencePiece's own do not fit otherwise


def _pack(
    source: np.ndarray, target: np.ndarray, sizes: np.ndarray, max_tokens: int, count: int
) -> list[Places] | None:
    """Places of all pairs in exactly `count` batches, each with its size; None where max_tokens is too little."""
    # with fewer sizes fewer pairs move to a larger one than theirs to fill its batches: what pays depends on the pairs
    plans = [plan_batches(source, target, sizes[::-keep][::-1], max_tokens) for keep in _THINNED]
    plan = min(plans, key=lambda plan: (max(len(plan.sizes), count), int(plan.cells.sum())))
    batches = list(zip(np.split(plan.order, plan.bounds[1:-1]), plan.sizes))
    if len(batches) > count:
        batches = _exact(source, target, max_tokens)
    if len(batches) > count:
        return None
    while len(batches) < count:
        cells = [len(group) * size.max() if len(group) > 1 else 0 for group, size in batches]
        largest = int(np.argmax(cells))
        group, size = batches[largest]
        batches[largest : largest + 1] = [(half, size) for half in np.array_split(group, 2)]
    return batches


def _exact(source: np.ndarray, target: np.ndarray, max_tokens: int) -> list[Places]:
    """Cut into as few batches as possible, each as long as its longest pair: for when sizes take too much."""
    order = np.argsort(np.maximum(source, target), kind="stable")[::-1]
    batches: list[Places] = []
    while len(order):
        group = order[: max_tokens // int(max(source[order[0]], target[order[0]]))]
        batches.append((group, np.array([source[group].max(), target[group].max()])))
        order = order[len(group) :]
    return batches
