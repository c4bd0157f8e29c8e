"""A glossary: terms of the source, and how each must be translated where it occurs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from fasttfm.data.tokenizer import EOS, UNK, Tokenizer
from fasttfm.errors import UserError

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Thai, Lao, Burmese, Khmer, kana and Chinese characters: scripts without spaces between words."""
_EDGE = re.compile(rf"[^\W{_UNSPACED}]")
"""A letter or digit that another one beside it would make a part of a longer word."""


class Terminology:
    """Source terms with the alternatives that may translate them.

    A term is searched for as whole words, whatever the white space in it; one without capitals in any case. Where terms
    overlap, the one that begins first counts, then the longer one. Every occurrence asks for a translation of its own.
    """

    def __init__(self, terms: Iterable[tuple[str, Iterable[str]]], tokenizer: Tokenizer) -> None:
        """terms: with their alternatives; one that occurs again gets more. tokenizer: the target's. UserError for an
        empty term or alternative, and for one that the vocabulary cannot write."""
        self.alternatives: list[list[list[int]]] = []
        numbers: dict[str, int] = {}
        for term, alternatives in terms:
            term, phrases = _checked(term, alternatives, tokenizer)
            if term not in numbers:
                numbers[term] = len(self.alternatives)
                self.alternatives.append([])
            self.alternatives[numbers[term]] += phrases
        self._terms = numbers
        longest_first = sorted(numbers, key=lambda term: (-len(term), term))
        self._numbers = [numbers[term] for term in longest_first]
        self._pattern = re.compile("|".join(f"({_as_pattern(term)})" for term in longest_first))
        self.continuations = continuations_of(tokenizer)

    @classmethod
    def from_lines(cls, lines: Iterable[str], path: str | Path, tokenizer: Tokenizer) -> Terminology:
        """Read lines `source term TAB translation TAB another translation ...`; empty ones are skipped. UserError names
        path and line of what is wrong."""
        terms = []
        for number, line in enumerate(lines, start=1):
            term, *alternatives = line.rstrip("\r").split("\t")
            if not line.strip():
                continue
            try:
                _checked(term, alternatives, tokenizer)
            except UserError as error:
                raise UserError(f"{path}, line {number:,}: {error}") from None
            terms.append((term, alternatives))
        return cls(terms, tokenizer)

    def refuse_banned(self, banned: Iterable[Sequence[int]]) -> None:
        """Raise UserError for a term of which every translation holds a sequence of banned tokens."""
        wanted = [f" {' '.join(map(str, ids))} " for ids in banned]
        for term, number in self._terms.items():
            phrases = [f" {' '.join(map(str, ids))} " for ids in self.alternatives[number]]
            if all(any(each in phrase for each in wanted) for phrase in phrases):
                raise UserError(f"--banned forbids every translation of the term {term!r}: allow one, or leave it out")

    def required(self, line: str) -> list[list[list[int]]]:
        """For every occurrence of a term in line the alternatives, as ids, of which the translation must hold one."""
        if not self.alternatives:
            return []
        matches = self._pattern.finditer(line)
        return [self.alternatives[self._numbers[match.lastindex - 1]] for match in matches if match.lastindex]


_continuations: WeakKeyDictionary[Tokenizer, frozenset[int]] = WeakKeyDictionary()


def continuations_of(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that go on a word; found out once for each tokenizer."""
    if tokenizer not in _continuations:
        pieces = tokenizer.pieces(range(len(tokenizer)))
        _continuations[tokenizer] = frozenset(
            token for token, piece in enumerate(pieces) if token > EOS and _goes_on(piece)
        )
    return _continuations[tokenizer]


def _checked(term: str, alternatives: Iterable[str], tokenizer: Tokenizer) -> tuple[str, list[list[int]]]:
    """The term with single spaces, and the ids of its alternatives."""
    term = " ".join(term.split())
    if not term:
        raise UserError("the term is empty: give a source term and its translations")
    phrases = [phrase for text in alternatives for phrase in _phrases(text, tokenizer)]
    if not phrases:
        raise UserError(f"{term!r} has no translation: give one at least")
    return term, phrases


def _as_pattern(term: str) -> str:
    words = r"\s+".join(map(re.escape, term.split()))
    before = rf"(?<![^\W{_UNSPACED}])" if _EDGE.match(term[0]) else ""
    after = rf"(?![^\W{_UNSPACED}])" if _EDGE.match(term[-1]) else ""
    return f"{before}(?i:{words}){after}" if term == term.lower() else f"{before}{words}{after}"


def _phrases(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of text as a word of its own, and in a script without spaces as a part of a line too."""
    ids = tokenizer.encode(text) if text.strip() else []
    if not ids:
        raise UserError("a translation is empty: leave it out")
    if UNK in ids:
        raise UserError(f"the model's vocabulary cannot write {text!r}: leave it out")
    phrases = [ids]
    (first,) = tokenizer.pieces(ids[:1])
    if re.match(rf"[{_UNSPACED}]", text.strip()) and first.startswith("\u2581"):
        inside = tokenizer.piece_id(first[1:]) if len(first) > 1 else None
        if len(first) == 1 and len(ids) > 1:
            phrases.append(ids[1:])
        elif inside is not None:
            phrases.append([inside, *ids[1:]])
    return phrases


def _goes_on(piece: str) -> bool:
    """Return whether a piece after a word makes it a longer one."""
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    if byte:
        value = int(byte[1], 16)
        return value >= 0x80 or chr(value).isalnum()
    return bool(_EDGE.match(piece[:1]))
