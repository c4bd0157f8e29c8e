"""A glossary: terms of the source, and how each must be translated where it occurs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

from fasttfm.data.moses_tokenizer import MosesTokenizer
from fasttfm.data.tokenizer import EOS, UNK, Tokenizer
from fasttfm.data.unicode_forms import composed
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
        self._any_case = _Automaton({_folded(term): numbers[term] for term in numbers if term == term.lower()})
        self._exact = _Automaton({term: numbers[term] for term in numbers if term != term.lower()})

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
        """Alternatives, as ids, for every occurrence of a term in line; the translation must hold one of each."""
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
    """Finds all terms in a line in one pass, in time that does not grow with their number.

    Source: Aho and Corasick 1975. State 0 has read nothing of any term.
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
        """By state: that of the longest beginning of a term which its text ends with, itself left out."""
        self._ending = [0] * len(self._next)
        """By state: the first one along `shorter` where a term ends; 0 for none."""
        states = [*self._next[0].values()]
        for state in states:  # grows: in the order of their lengths
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
        """Begin, end and number of every term in line, also of those within others."""
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
    """The tokens that go on a word; found out once for each tokenizer."""
    if tokenizer not in _continuations:
        pieces = tokenizer.pieces(range(len(tokenizer)))
        _continuations[tokenizer] = frozenset(
            token for token, piece in enumerate(pieces) if token > EOS and _goes_on(piece)
        )
    return _continuations[tokenizer]


def _checked(term: str, alternatives: Iterable[str], tokenizer: Tokenizer) -> tuple[str, list[list[int]]]:
    """The term with single spaces, and the ids of its alternatives."""
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
    """Return whether no longer word holds this part of line."""

    def goes_on(before: int) -> bool:
        return bool(0 < before < len(line) and _EDGE.match(line, before - 1) and _EDGE.match(line, before))

    return not goes_on(begin) and not goes_on(end)


@lru_cache(4096)
def _fold(character: str) -> str:
    """Return what all cases of a character have in common, as one character."""
    forms = (character.casefold(), character.lower(), character)
    return next(form for form in forms if len(form) == 1)


def _folded(text: str) -> str:
    return "".join(map(_fold, text))


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
