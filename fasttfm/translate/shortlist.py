"""Vocabulary maps: the target tokens that each source token may bring into a translation (lexical shortlists).

The file is CTranslate2's `vmap.txt`: a line a source token (or several, separated by spaces), a tab, and the target
tokens that it brings, separated by spaces. What a line without source tokens brings, every sentence may write.
Source: Jean et al. 2015, section 3.2 (candidate lists); Marian's --shortlist, CTranslate2's use_vmap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fasttfm.data.corpus import read_lines, refuse_cut
from fasttfm.data.lexicon import estimate, token_counts
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.tokenizer import EOS, Tokenizer
from fasttfm.errors import UserError
from fasttfm.system.files import replace_file

FILE_NAME = "vmap.txt"


class Shortlist:
    """Target tokens that a sentence may be translated by."""

    def __init__(self, always: Iterable[int], by_source: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """always: target ids that every sentence may write; by_source: what runs of source ids add to them."""
        self.always = np.unique(np.fromiter(always, dtype=np.int64))
        self.by_source = {source: np.asarray(targets, dtype=np.int64) for source, targets in by_source.items()}
        self._longest = max(map(len, self.by_source), default=0)

    def tokens(self, source: Sequence[int]) -> list[int]:
        """The target ids, rising, that a source (ids) may be translated by."""
        runs = {
            tuple(source[first : first + length])
            for length in range(1, self._longest + 1)
            for first in range(len(source) - length + 1)
        }
        parts = [self.always, *(self.by_source[run] for run in runs if run in self.by_source)]
        tokens: list[int] = np.unique(np.concatenate(parts)).tolist()
        return tokens

    @classmethod
    def from_pairs(
        cls, pairs: ParallelTokens, source: Tokenizer, target: Tokenizer, *, best: int, frequent: int, iterations: int
    ) -> Shortlist:
        """Make a shortlist of training data: the `best` likeliest translations of each source token by IBM model 1, the
        token itself where the target vocabulary has it, and for all sentences the `frequent` most frequent target
        tokens.

        ValueError for numbers below 1, UserError for data without pairs.
        """
        if best < 1 or frequent < 1:
            raise ValueError(f"best {best} and frequent {frequent} must be at least 1")
        if not len(pairs):
            raise UserError("the data have no training pairs: run fasttfm prepare with some")
        lexicon = estimate(pairs, len(source), len(target), iterations)
        counts = token_counts(pairs, len(target))
        most = np.argsort(-counts, kind="stable")[:frequent]
        ids = {piece: number for number, piece in enumerate(target.pieces(range(len(target))))}
        by_source: dict[tuple[int, ...], Sequence[int]] = {}
        likeliest = lexicon.best(best)
        for number, piece in enumerate(source.pieces(range(len(source)))):
            itself = [ids[piece]] if number > EOS and piece in ids else []
            targets = [*likeliest.get(number, []), *itself]
            if targets:
                by_source[(number,)] = list(dict.fromkeys(map(int, targets)))
        return cls(most[counts[most] > 0], by_source)

    @classmethod
    def load(cls, path: Path, source: Tokenizer, target: Tokenizer) -> Shortlist:
        """Read a shortlist file. UserError names path and line of what is wrong, such as a token of another
        vocabulary."""
        refuse_cut(path)
        sides = [{piece: n for n, piece in enumerate(each.pieces(range(len(each))))} for each in (source, target)]
        by_source: dict[tuple[int, ...], list[int]] = {}
        for number, line in enumerate(read_lines(path), start=1):
            parts = line.split("\t")
            if len(parts) != 2:
                raise UserError(
                    f"{path}, line {number:,}: must be source tokens, a tab and target tokens: "
                    "fasttfm shortlist makes the file"
                )
            run, targets = (
                [_number(piece, ids, f"{path}, line {number:,}") for piece in part.split(" ") if piece]
                for part, ids in zip(parts, sides)
            )
            by_source.setdefault(tuple(run), []).extend(targets)
        if not any(by_source.values()):
            raise UserError(f"{path}: allows no token: make the file with fasttfm shortlist MODEL")
        return cls(by_source.pop((), []), by_source)

    def save(self, path: Path, source: Tokenizer, target: Tokenizer) -> None:
        """Write the file, without tokens that have its separators (a tab); OSError where that cannot be done."""
        lines = [f"\t{_joined(target, self.always)}\n"]
        for run in sorted(self.by_source):
            if _joined(source, run):
                lines.append(f"{_joined(source, run)}\t{_joined(target, self.by_source[run])}\n")
        content = "".join(lines)
        replace_file(path, content.encode())


def _joined(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> str:
    """The pieces that the file can hold."""
    return " ".join(piece for piece in tokenizer.pieces(ids) if not set(piece) & set(" \t\r\n"))


def _number(piece: str, ids: Mapping[str, int], where: str) -> int:
    if piece not in ids:
        raise UserError(f"{where}: {piece!r} is not a token of the model: make the file with fasttfm shortlist MODEL")
    return ids[piece]
