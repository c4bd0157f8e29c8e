"""Lexical shortlists (vocabulary maps): the target tokens that each source token allows in a translation.

The file is CTranslate2's `vmap.txt`. Each line has a source token (or several, space-separated), a tab, and the target
tokens that it allows, space-separated. The line without source tokens lists those allowed in every sentence; it comes
last, so that a truncated file is detected.
Source: Jean et al. 2015, section 3.2 (candidate lists); Marian's --shortlist, CTranslate2's use_vmap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fasttfm.data.corpus import is_cut, read_lines
from fasttfm.data.lexicon import estimate, token_counts
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.tokenizer import EOS, Tokenizer
from fasttfm.errors import UserError
from fasttfm.system.files import replace_file

FILE_NAME = "vmap.txt"


class Shortlist:
    """Allowed target tokens by source tokens."""

    def __init__(self, always: Iterable[int], by_source: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """always: target ids allowed in every sentence. by_source: those that runs of source ids add."""
        self.always = np.unique(np.fromiter(always, dtype=np.int64))
        self.by_source = {source: np.asarray(targets, dtype=np.int64) for source, targets in by_source.items()}
        self._longest = max(map(len, self.by_source), default=0)

    def tokens(self, source: Sequence[int]) -> list[int]:
        """Allowed target ids of a source (ids), ascending."""
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
        cls, pairs: ParallelTokens, source: Tokenizer, target: Tokenizer, *, best: int, frequent: int
    ) -> Shortlist:
        """Build a shortlist from training data.

        Allows the `best` likeliest translations of each source token by IBM model 1, the token itself if the target
        vocabulary has it, and the `frequent` most frequent target tokens everywhere. Raises UserError for data
        without pairs.
        """
        if not len(pairs):
            raise UserError("the data have no training pairs: run fasttfm prepare with some")
        lexicon = estimate(pairs, len(source), len(target))
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
        """Read a shortlist file. Raises UserError with path and line, as for a token of another vocabulary."""
        if is_cut(path):
            raise UserError(f"{path}: its last line has no end, it seems to be truncated: copy or make it again")
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
        if not by_source.get(()):
            raise UserError(
                f"{path}: has no tokens for every sentence, whose line stands last: it seems to be truncated: copy it "
                "again, or make it with fasttfm shortlist MODEL"
            )
        return cls(by_source.pop(()), by_source)

    def save(self, path: Path, source: Tokenizer, target: Tokenizer) -> None:
        """Write the file; tokens that contain a separator (a tab) are left out. Raises OSError."""
        runs = [(_joined(source, run), targets) for run, targets in sorted(self.by_source.items())]
        lines = [f"{run}\t{_joined(target, targets)}\n" for run, targets in runs if run]
        replace_file(path, "".join([*lines, f"\t{_joined(target, self.always)}\n"]).encode())


def _joined(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> str:
    """Space-separated pieces, without those that contain a separator."""
    return " ".join(piece for piece in tokenizer.pieces(ids) if not set(piece) & set(" \t\r\n"))


def _number(piece: str, ids: Mapping[str, int], where: str) -> int:
    if piece not in ids:
        raise UserError(f"{where}: {piece!r} is not a token of the model: make the file with fasttfm shortlist MODEL")
    return ids[piece]
