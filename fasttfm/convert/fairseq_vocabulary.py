"""The dictionaries of fairseq-preprocess, and tokenizers that cut text into their pieces.

A line of dict.LANG.txt is a piece and how often it was counted. Pieces are SentencePiece's, or those of fastBPE and
subword-nmt, which end in @@ where another follows in the word.
"""

from collections.abc import Callable
from pathlib import Path

from fasttfm.convert.exchange import NO_TEXT, Arrangement, numbered_tokenizer
from fasttfm.data.moses_tokenizer import JOINED, MosesTokenizer, MosesVocabulary
from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.errors import UserError
from fasttfm.system.files import unreadable

START, PAD, EOS, UNK = range(4)
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
_COVERED = 0.97
"""Share of a dictionary's tokens that are pieces of its SentencePiece model. Of three German corpora in 8,000 pieces
their own models have 99.8 %, the other algorithm's on the same corpus at most 95.5 %, another corpus's at most 87 %;
codes of 4,000 merges 100 % of their own and at most 82 % of another."""
_JOINED = 0.02


class Dictionary:
    """The dictionary of a side."""

    def __init__(self, path: Path, counts: list[tuple[str, int]]) -> None:
        self.path, self.counts = path, counts
        self.pieces = [*_SPECIAL, *(piece for piece, _ in counts)]
        """By their numbers."""
        self.arrangement = Arrangement(len(self.pieces), pad=PAD, unk=UNK, start=EOS, eos=EOS)

    @classmethod
    def read(cls, path: Path) -> "Dictionary":
        """Raises UserError for a file that is missing or damaged."""
        try:
            lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        except FileNotFoundError:
            raise UserError(f"{path}: no such dictionary: fairseq-preprocess wrote it as dict.LANG.txt") from None
        except OSError as error:
            raise unreadable(path, error) from error
        except UnicodeDecodeError:
            raise UserError(f"{path}: is not UTF-8, so it is not a dictionary of fairseq-preprocess") from None
        pieces = []
        for number, line in enumerate(lines, start=1):
            line = line.removesuffix(" #fairseq:overwrite")
            piece, _, count = line.rpartition(" ")
            if not piece or not count.isdecimal():
                raise UserError(f"{path}: line {number:,} is not a piece with its count: {line[:60]!r}")
            pieces.append((piece, int(count)))
        return cls(path, pieces)

    def tokenizer(self, file: Path, language: str | None) -> Tokenizer:
        """Return the tokenizer that cuts text into the pieces; UserError where they are those of another one.

        file: a SentencePiece model, or codes, which take the language of Moses' rules.
        """
        self._refuse_other_joins(language is not None)
        pieces = self.arrangement.pieces(self.pieces)
        if language is None:
            vocabulary = Vocabulary(pieces=pieces, prefix=[], silent=["<s>"])
            tokenizer = numbered_tokenizer(file, vocabulary)
        else:
            vocabulary = MosesVocabulary.inferred(language, pieces, prefix=[], silent=["<s>"])
            tokenizer = numbered_tokenizer(file, vocabulary, MosesTokenizer)
        covered = self._share(tokenizer.cuts_into)
        if covered < _COVERED:
            raise UserError(
                f"{file}: has the pieces of {covered:.1%} of the tokens in {self.path}, {_COVERED:.0%} are needed: "
                "it is of another corpus"
            )
        return tokenizer

    def _refuse_other_joins(self, has_codes: bool) -> None:
        """Raise UserError where codes are given for pieces of SentencePiece, or the other way round."""
        joined = self._share(lambda piece: piece.endswith(JOINED))
        told = f"{self.path}: {joined:.0%} of its tokens end in {JOINED}"
        if joined > _JOINED and not has_codes:
            raise UserError(f"{told}: it is of subword-nmt or fastBPE: give their --codes in place of --spm")
        if joined <= _JOINED and has_codes:
            raise UserError(f"{told}: it is not of subword-nmt or fastBPE: give --spm in place of --codes")

    def _share(self, holds: Callable[[str], bool]) -> float:
        """The share of the tokens for which something holds."""
        text = [(piece, count) for piece, count in self.counts if not NO_TEXT.fullmatch(piece)]
        return sum(count for piece, count in text if holds(piece)) / max(1, sum(count for _, count in text))
