"""Terminology: source terms and the translations that are required where they occur."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

from fasttfm.data.moses_tokenizer import MosesTokenizer
from fasttfm.data.tokenizer import EOS, UNK, Tokenizer
from fasttfm.data.unicode_forms import composed
from fasttfm.errors import UserError

_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Thai, Lao, Burmese, Khmer, kana and Chinese characters: scripts without spaces between words."""


class Terminology:
    """Source terms with alternative translations.

    Terms match whole words, whatever the white space between them; a term in lower case matches any case. Of
    overlapping terms the one that begins first counts, then the longer one. Every occurrence requires a translation of
    its own.
    """

    def __init__(self, terms: Iterable[tuple[str, Iterable[str]]], tokenizer: Tokenizer) -> None:
        """terms: with their alternatives; a repeated term adds to them. tokenizer: of the target. Raises UserError for
        an empty term or alternative, and for one that the vocabulary cannot spell."""
        self.alternatives: list[list[list[int]]] = []
        numbers: dict[str, int] = {}
        for term, alternatives in terms:
            term, phrases = _checked(term, alternatives, tokenizer)
            if term not in numbers:
                numbers[term] = len(self.alternatives)
                self.alternatives.append([])
            self.alternatives[numbers[term]] += phrases
        self._terms = numbers
        self._any_case = _Automaton({_folded(term): numbers[term] for term in numbers if term == term.lower()})
        self._exact = _Automaton({term: numbers[term] for term in numbers if term != term.lower()})

    @classmethod
    def from_lines(cls, lines: Iterable[str], path: str | Path, tokenizer: Tokenizer) -> Terminology:
        """Read lines `source term TAB translation TAB another translation ...`; empty ones are skipped. Raises
        UserError with path and line number."""
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
        """Raise UserError for a term whose translations all contain a banned token sequence."""
        forbidden = [f" {' '.join(map(str, ids))} " for ids in banned]
        for term, number in self._terms.items():
            phrases = [f" {' '.join(map(str, ids))} " for ids in self.alternatives[number]]
            if all(any(each in phrase for each in forbidden) for phrase in phrases):
                raise UserError(f"--banned forbids every translation of the term {term!r}: allow one, or leave it out")

    def required(self, line: str) -> list[list[list[int]]]:
        """Alternatives, as ids, for every occurrence of a term in line; the translation must contain one of each."""
        if not self.alternatives:
            return []
        line = composed(" ".join(line.split()))
        found = [*self._exact.find(line), *self._any_case.find(_folded(line))]
        required, free = [], 0
        for begin, end, number in sorted(found, key=lambda each: (each[0], -each[1])):
            if begin >= free and _is_whole(line, begin, end):
                required.append(self.alternatives[number])
                free = end
        return required


class _Automaton:
    """Finds all terms in a line in one pass, in time independent of their number (Aho and Corasick 1975).

    State 0 is the empty prefix.
    """

    def __init__(self, terms: Mapping[str, int]) -> None:
        """terms: with their numbers."""
        self._next: list[dict[str, int]] = [{}]
        self._ends: list[tuple[int, int] | None] = [None]
        """By state: length and number of the term that ends there."""
        for term, number in terms.items():
            state = 0
            for character in term:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._ends.append(None)
                state = self._next[state][character]
            self._ends[state] = len(term), number
        self._shorter = [0] * len(self._next)
        """By state: the failure link, to the longest proper suffix that is a prefix of a term."""
        self._ending = [0] * len(self._next)
        """By state: the first state along the failure links where a term ends; 0 for none."""
        states = [*self._next[0].values()]
        for state in states:  # grows, in breadth-first order
            shorter = self._shorter[state]
            self._ending[state] = shorter if self._ends[shorter] else self._ending[shorter]
            for character, following in self._next[state].items():
                self._shorter[following] = self._after(shorter, character)
                states.append(following)

    def _after(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def find(self, line: str) -> Iterator[tuple[int, int, int]]:
        """Yield begin, end and number of every term in line, nested ones included."""
        state = 0
        for end, character in enumerate(line, start=1):
            state = self._after(state, character)
            ending = state
            while ending:
                if term := self._ends[ending]:
                    yield end - term[0], end, term[1]
                ending = self._ending[ending]


_continuations: WeakKeyDictionary[Tokenizer, frozenset[int]] = WeakKeyDictionary()


def continuations_of(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that continue a word; cached per tokenizer."""
    if tokenizer not in _continuations:
        pieces = tokenizer.pieces(range(len(tokenizer)))
        _continuations[tokenizer] = frozenset(
            token for token, piece in enumerate(pieces) if token > EOS and _continues_word(piece)
        )
    return _continuations[tokenizer]


def _checked(term: str, alternatives: Iterable[str], tokenizer: Tokenizer) -> tuple[str, list[list[int]]]:
    """The normalized term, and the ids of its alternatives."""
    term = composed(" ".join(term.split()))
    if not term:
        raise UserError("the term is empty: give a source term and its translations")
    if isinstance(tokenizer, MosesTokenizer):
        raise UserError(
            "terms need a vocabulary of SentencePiece, and this model's pieces are of fastBPE or subword-nmt"
        )
    phrases = [phrase for text in alternatives for phrase in _phrases(composed(text), tokenizer)]
    if not phrases:
        raise UserError(f"{term!r} has no translation: give at least one")
    return term, phrases


def _is_whole(line: str, begin: int, end: int) -> bool:
    """Return whether line[begin:end] is not part of a longer word."""

    def goes_on(before: int) -> bool:
        return 0 < before < len(line) and _in_word(line[before - 1]) and _in_word(line[before])

    return not goes_on(begin) and not goes_on(end)


def _in_word(character: str) -> bool:
    """Return whether a character forms one word with adjacent ones: a letter, a digit, or a mark such as a vowel."""
    is_mark = unicodedata.category(character).startswith("M")
    return (is_mark or character.isalnum() or character == "_") and not _UNSPACED.match(character)


@lru_cache(4096)
def _fold(character: str) -> str:
    """Case-fold a character to one character."""
    forms = (character.casefold(), character.lower(), character)
    return next(form for form in forms if len(form) == 1)


def _folded(text: str) -> str:
    return "".join(map(_fold, text))


def _phrases(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of text as a word, and in scripts without spaces also as a part of a line."""
    ids = tokenizer.encode(text) if text.strip() else []
    if not ids:
        raise UserError("a translation is empty: leave it out")
    if UNK in ids:
        raise UserError(f"the model's vocabulary cannot write {text!r}: leave it out")
    phrases = [ids]
    (first,) = tokenizer.pieces(ids[:1])
    if _UNSPACED.match(text.strip()) and first.startswith("\u2581"):
        inside = tokenizer.piece_id(first[1:]) if len(first) > 1 else None
        if len(first) == 1 and len(ids) > 1:
            phrases.append(ids[1:])
        elif inside is not None:
            phrases.append([inside, *ids[1:]])
    return phrases


def _continues_word(piece: str) -> bool:
    """Return whether a piece continues a word that precedes it."""
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    if byte:
        value = int(byte[1], 16)
        return value >= 0x80 or chr(value).isalnum()
    return bool(piece) and _in_word(piece[0])
