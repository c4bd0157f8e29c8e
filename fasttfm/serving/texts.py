"""From the texts of a request to lines that are translated each by itself, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fasttfm.decoding.alignment import WORDS
from fasttfm.decoding.markup import Marked, MarkedLine
from fasttfm.decoding.sentences import join_sentences, sentences_of
from fasttfm.decoding.translator import Translation, one_line
from fasttfm.errors import UserError


class Text(Protocol):
    """A text of a request."""

    @property
    def lines(self) -> list[str]:
        """Return the lines to translate."""

    def put_together(self, translated: Sequence[list[Translation]]) -> list[Translation]:
        """Its translations, best first, from those of its lines: the n-th best of each, with their mean score; a line
        that has fewer, as an empty one has, gives its last."""


@dataclass(slots=True)
class Lines:
    """A text whose lines are translated each by itself."""

    lines: list[str]

    @classmethod
    def of(cls, text: str) -> Lines:
        """The lines of a text; only a line feed ends one."""
        return cls([one_line(line) for line in text.split("\n")])

    def put_together(self, translated: Sequence[list[Translation]]) -> list[Translation]:
        """See Text."""
        ranks = range(max(map(len, translated)))
        return [self._joined([best[min(rank, len(best) - 1)] for best in translated]) for rank in ranks]

    def _joined(self, chosen: Sequence[Translation]) -> Translation:
        if len(chosen) == 1:
            return chosen[0]
        links, sources, targets = [], 0, 0
        for line, each in zip(self.lines, chosen, strict=True):
            links += [(one + sources, other + targets) for one, other in each.alignment]
            sources += len(WORDS.findall(line))
            targets += len(WORDS.findall(each.text))
        score = sum(each.score for each in chosen) / len(chosen)
        probability = sum(each.log_probability for each in chosen)
        return Translation("\n".join(each.text for each in chosen), score, probability, tuple(links))


@dataclass(slots=True)
class Sentences:
    """A text whose sentences are translated each by itself."""

    text: Lines
    sentences: list[list[str]]
    """Those of each line."""

    @classmethod
    def of(cls, text: str, split: Callable[[str], list[str]]) -> Sentences:
        """split: as of sentence_splitter()."""
        lines = Lines.of(text)
        return cls(lines, [sentences_of(line, split) for line in lines.lines])

    @property
    def lines(self) -> list[str]:
        """See Text."""
        return [sentence for line in self.sentences for sentence in line]

    def put_together(self, translated: Sequence[list[Translation]]) -> list[Translation]:
        """See Text; the best one alone."""
        following = iter(translated)
        joined = [join_sentences(line, [next(following)[0] for _ in line]) for line in self.sentences]
        return self.text.put_together([[each] for each in joined])


@dataclass(slots=True)
class Document:
    """A text with tags."""

    marked: MarkedLine

    @classmethod
    def of(cls, text: str, most_tags: int) -> Document:
        """most_tags: inline tags between two block elements. UserError for more, and for tags that are not balanced."""
        marked = MarkedLine.parse(text)
        for each in marked.texts.values():
            if (count := _count(each)) > most_tags:
                raise UserError(
                    f"{count:,} inline tags stand in one text between block elements: {most_tags:,} at most are taken"
                )
        return cls(marked)

    @property
    def lines(self) -> list[str]:
        """See Text."""
        return [each.text for each in self.marked.texts.values()]

    def put_together(self, translated: Sequence[list[Translation]]) -> list[Translation]:
        """See Text."""
        return self.marked.render([*translated])


def _count(marked: Marked) -> int:
    """Its elements, at any depth."""
    count, waiting = 0, [*marked.elements]
    while waiting:
        count += 1
        waiting += waiting.pop().children
    return count
