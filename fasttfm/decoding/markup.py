"""Tags of the source: block elements separate what is translated (markup_blocks.py), inline tags are taken out before
a text is translated, and put into the translation by its alignment.

Every tag of the source comes once, inside the elements that it was in. An element encloses the run of the translation
that holds most words linked to its own and fewest linked to others; one that has no words stands where its neighbours
went. What is between tags is text: entities such as &lt; are read, and &, < and > of the translation are written so.
"""

from __future__ import annotations

import html
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fasttfm.decoding.alignment import PARTS, Links
from fasttfm.decoding.markup_blocks import VOID, split_blocks, unbalanced
from fasttfm.decoding.markup_tags import Tags
from fasttfm.decoding.translator import Translation, Translator, one_line, paired
from fasttfm.errors import UserError


@dataclass(slots=True)
class Element:
    """A tag with its content."""

    name: str
    opening: str
    begin: int
    """Where it begins in the text without tags."""
    end: int = 0
    closing: str = ""
    """Empty for <br/> and comments, which enclose nothing."""
    children: list[Element] = field(default_factory=list)
    leans_left: bool = False
    """Whether it follows a word without a space between, and a space or nothing follows it."""


@dataclass(slots=True)
class Marked:
    """A line of the source in two: its text and its elements."""

    text: str
    elements: list[Element]

    @classmethod
    def parse(cls, line: str) -> Marked:
        """UserError for tags that are not balanced."""
        root = Element("", "", 0)
        open_elements = [root]
        text, last = "", 0
        separate = False  # an empty element stands between two letters: they belong to two words
        tags = Tags(line)
        while True:
            tag = tags.find(last)
            between = html.unescape(line[last : tag.begin if tag else len(line)])
            between = " ".join(between.splitlines()) if "\n" in between or "\r" in between else between
            if separate and text[-1:].isalnum() and between[:1].isalnum():
                text += " "
            text += between
            separate = separate and not between
            if tag is None:
                break
            last = tag.end
            if tag.closes:
                element = open_elements.pop()
                if not open_elements or element.name != tag.name:
                    raise UserError(unbalanced(f"{tag.text} closes nothing that is open"))
                element.end, element.closing = len(text), tag.text
                continue
            follows = line[last : last + 1]
            leans = bool(text) and not text[-1].isspace() and (not follows or follows.isspace())
            element = Element(tag.name, tag.text, len(text), len(text), leans_left=leans)
            open_elements[-1].children.append(element)
            if not tag.name or tag.text.endswith("/>") or tag.name.lower() in VOID:
                separate = True
            else:
                open_elements.append(element)
        if len(open_elements) > 1:
            raise UserError(unbalanced(f"{open_elements[-1].opening} is not closed"))
        return cls(text, root.children)

    def insert(self, translation: str, links: Links) -> str:
        """The translation with the elements in it; links between the PARTS of text and of translation."""
        return _Insertion(self.text, translation, links).render(self.elements)


def translate_marked(
    translator: Translator, lines: Iterable[str], prefixes: Iterable[str] | None = None
) -> Iterator[list[Translation]]:
    """Translate lines with tags, as Translator.translate_stream() does; the translator must align PARTS.

    The text of each block element is translated by itself; a prefix is that of a line's first text. UserError names a
    line whose tags are not balanced, after the translations of those before it.
    """
    waiting: deque[MarkedLine] = deque()
    beginnings: deque[str] = deque()  # of the texts that the translator has not asked for yet
    first_texts: list[int] = []  # of each line, counted from 1
    count = 0

    def plain() -> Iterator[str]:
        nonlocal count
        for number, (line, prefix) in enumerate(paired(lines, prefixes), start=1):
            try:
                waiting.append(MarkedLine.parse(one_line(line).strip()))
            except UserError as error:
                raise UserError(f"standard input, line {number:,}: {error}") from None
            texts = [marked.text for marked in waiting[-1].texts.values()]
            beginnings.extend([prefix, *[""] * (len(texts) - 1)])
            first_texts.append(count + 1)
            count += len(texts)
            yield from texts

    def forced() -> Iterator[str]:
        while beginnings:
            yield beginnings.popleft()

    translated: list[list[Translation]] = []
    for translations in translator.translate_stream(plain(), None if prefixes is None else forced()):
        translated.append(translations)
        if len(translated) == len(waiting[0].texts):
            yield waiting.popleft().render(translated)
            translated = []
    if translator.first_cut_line is not None:
        translator.first_cut_line = bisect_right(first_texts, translator.first_cut_line)


@dataclass(slots=True)
class MarkedLine:
    """A line as pieces, of which some are texts to translate."""

    pieces: list[str]
    """As of split_blocks(); of the texts among them the white space around is left."""
    texts: dict[int, Marked]
    """Their places among the pieces; at least one, possibly without any text."""

    @classmethod
    def parse(cls, line: str) -> MarkedLine:
        """UserError for tags that are not balanced."""
        pieces = split_blocks(line)
        texts = {place: Marked.parse(pieces[place].strip()) for place in range(0, len(pieces), 2)}
        kept = {place: marked for place, marked in texts.items() if marked.text.strip() or marked.elements}
        return cls(pieces, kept or {0: texts[0]})

    def render(self, translated: list[list[Translation]]) -> list[Translation]:
        """The translations of the line, best first: the n-th best of each text, whose last where it has fewer."""
        results = []
        for rank in range(max(map(len, translated))):
            chosen = [best[min(rank, len(best) - 1)] for best in translated]
            pieces = [*self.pieces]
            for (place, marked), each in zip(self.texts.items(), chosen):
                before, after = _white_space(pieces[place])
                pieces[place] = before + marked.insert(each.text, each.alignment) + after
            score = sum(each.score for each in chosen) / len(chosen)
            probability = sum(each.log_probability for each in chosen)
            alignment = chosen[0].alignment if len(chosen) == 1 else ()
            results.append(Translation("".join(pieces), score, probability, alignment))
        return results


def _white_space(text: str) -> tuple[str, str]:
    """The white space that a text begins with, and that it ends with."""
    if not text.strip():
        return text, ""
    return text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]


@dataclass(slots=True)
class _Open:
    """An element that is being written."""

    elements: Iterator[tuple[Element, int, int]]
    """Those in it that are still to come, with the parts that they take."""
    low: int
    """The first part that it takes."""
    cursor: int
    """Character of the translation up to which it is written."""
    end: int
    closing: str


class _Insertion:
    """Places for elements in one translation, counted in its parts."""

    def __init__(self, source: str, target: str, links: Links) -> None:
        self.source = [match.span() for match in PARTS.finditer(source)]
        self.target = [match.span() for match in PARTS.finditer(target)]
        self.text = target
        self.sources_of: list[set[int]] = [set() for _ in self.target]
        self.targets_of: list[set[int]] = [set() for _ in self.source]
        for one, other in links:
            self.sources_of[other].add(one)
            self.targets_of[one].add(other)

    def render(self, elements: Sequence[Element]) -> str:
        """The translation with the elements in it. A loop and no recursion: elements may be nested in thousands."""
        written: list[str] = []
        waiting = [_Open(iter(self._without_overlap(elements, 0, len(self.target), None)), 0, 0, len(self.text), "")]
        while waiting:
            around = waiting[-1]
            following = next(around.elements, None)
            if following is None:
                written += html.escape(self.text[around.cursor : around.end], quote=False), around.closing
                waiting.pop()
                continue
            element, first, last = following
            start = self._character(element, first, last, around.low)
            start = min(max(start, around.cursor), around.end)
            stop = min(max(self.target[last - 1][1], start), around.end) if last > first else start
            written += html.escape(self.text[around.cursor : start], quote=False), element.opening
            around.cursor = stop
            children = iter(self._without_overlap(element.children, first, last, element))
            waiting.append(_Open(children, first, start, stop, element.closing))
        return "".join(written)

    def _character(self, element: Element, first: int, last: int, low: int) -> int:
        """Return where the tag of an element that takes parts first to last begins."""
        after_part = first > low and last == first and (element.leans_left or first == len(self.target))
        if after_part:
            return self.target[first - 1][1]
        return self.target[first][0] if first < len(self.target) else len(self.text)

    def _without_overlap(
        self, elements: Sequence[Element], low: int, high: int, around: Element | None
    ) -> list[tuple[Element, int, int]]:
        """Elements with the parts that they take, in the order of the translation."""
        wanted = sorted(
            ((*self._wanted(element, low, high, around), index) for index, element in enumerate(elements)),
            key=lambda each: (each[0], each[2]),
        )
        insertions = []
        for first, last, index in wanted:
            first = max(first, low)
            low = max(last, first)
            insertions.append((elements[index], first, low))
        return insertions

    def _wanted(self, element: Element, low: int, high: int, around: Element | None) -> tuple[int, int]:
        """The parts of the translation between low and high that an element would enclose."""
        enclosed = self._parts(element.begin, element.end)
        outer = self._parts(around.begin, around.end) if around else set(range(len(self.source)))
        if enclosed and enclosed == outer:
            return low, high
        run = self._best_run(enclosed, low, high) if enclosed else None
        if run is not None:
            return run
        before = [part for part in outer if self.source[part][1] <= element.begin]
        after = [part for part in outer if self.source[part][0] >= element.begin]
        if not before or not after:
            return (high, high) if before else (low, low)
        previous = [part for part in self.targets_of[max(before)] if low <= part < high]
        following = [part for part in self.targets_of[min(after)] if low <= part < high]
        if previous or following:
            point = max(previous) + 1 if previous else min(following)
        else:
            point = low + round((high - low) * len(before) / len(outer))
        return point, point

    def _parts(self, begin: int, end: int) -> set[int]:
        return {part for part, (first, last) in enumerate(self.source) if first < end and last > begin}

    def _best_run(self, enclosed: set[int], low: int, high: int) -> tuple[int, int] | None:
        """The run with the most parts that are linked to enclosed ones, less those that are linked to others alone."""
        best, run = 0, None
        total, first = 0, low
        for part in range(low, high):
            linked = self.sources_of[part]
            gain = 1 if linked & enclosed else -1 if linked else 0
            if total <= 0:
                total, first = 0, part
            total += gain
            if gain > 0 and total > best:
                best, run = total, (first, part + 1)
        if run is None:
            return None
        first = next(part for part in range(*run) if self.sources_of[part] & enclosed)
        return first, run[1]
