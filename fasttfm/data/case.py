"""Case augmentation: pairs in capitals, and sources in title case, for models that meet headlines and shouting.

Prepared data hold subwords, so a chosen pair is decoded, cased and encoded again, in every epoch anew: what is on the
disk stays as it is. Marian's --all-caps-every and --english-title-case-every do the same to every Nth line of text.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fasttfm.data.sampling import mix, uniform
from fasttfm.data.tokenizer import UNK, Tokenizer
from fasttfm.errors import UserError

Sides = tuple[list[np.ndarray], list[np.ndarray]]
"""Ids of sources and targets, pair by pair."""


class CaseAugment:
    """Changes the case of some pairs: of half of them both sides to capitals, of half the source alone to title case.

    The target of a title stays: a translation of one is no title in every language.
    """

    def __init__(self, share: float, tokenizers: tuple[Tokenizer, Tokenizer], tags: Sequence[str] = ()) -> None:
        """share: of the pairs, in [0, 1]. tokenizers: of source and target. tags: first words that keep their case."""
        if any(tokenizer.vocabulary is not None for tokenizer in tokenizers):
            raise UserError("--case-augment: an imported vocabulary does not give back the text: leave it out")
        self._share, self._tokenizers, self._tags = share, tokenizers, frozenset(tags)

    def cased(self, sides: Sides, keys: np.ndarray) -> Sides:
        """The pairs, of which the keys choose some: sampling.sentence_keys of the sources.

        A pair stays where its source has no letter to change, as nothing would tell the target's capitals, and where
        the vocabulary cannot spell them.
        """
        source, target = map(list, sides)
        drawn = uniform(mix(keys))
        for i in np.flatnonzero(drawn < self._share).tolist():
            is_title = drawn[i] < self._share / 2
            ids = self._encoded(0, source[i], _title if is_title else str.upper)
            target_ids = target[i] if is_title else self._encoded(1, target[i], str.upper)
            if not (np.array_equal(ids, source[i]) or UNK in ids or UNK in target_ids):
                source[i], target[i] = ids, target_ids
        return source, target

    def _encoded(self, side: int, ids: np.ndarray, change: Callable[[str], str]) -> np.ndarray:
        tokenizer = self._tokenizers[side]
        text = tokenizer.decode(ids)
        first, space, rest = text.partition(" ")
        tagged = side == 0 and first in self._tags
        return np.array(tokenizer.encode(f"{first}{space}{change(rest)}" if tagged else change(text)), np.int64)


def _title(text: str) -> str:
    return " ".join(word[:1].title() + word[1:] for word in text.split(" "))
