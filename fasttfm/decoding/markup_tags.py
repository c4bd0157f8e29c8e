"""Finds the tags of HTML or XML in time that grows with the text alone, whatever the text is.

What looks like the beginning of a tag and has no end is text: `a <b` or `<!-- `. A regular expression would look for
the end of each such beginning anew, which takes minutes for a megabyte of them.
"""

import re
from dataclasses import dataclass

_BEGIN = re.compile(r"</?([A-Za-z_][\w:.-]*)")
_DECLARATION = re.compile(r"<![A-Za-z][^<>]*>")
_SPECIAL = re.compile("[<>\"']")
_ENCLOSED = (("<!--", "-->"), ("<?", "?>"))
"""How comments and processing instructions begin and end."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag, a comment, a declaration or a processing instruction."""

    text: str
    begin: int
    end: int
    name: str = ""
    """Empty for what is not a tag."""

    @property
    def closes(self) -> bool:
        """True if it is a closing tag."""
        return self.text.startswith("</")


class Tags:
    """The tags of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._ends: dict[int, int] = {}
        """Place inside a tag, outside of quotes -> the end of the tag, 0 where it has none."""
        self._absent: dict[str, int] = {}
        """End of _ENCLOSED -> a place from which it does not come any more."""

    def find(self, place: int = 0) -> Tag | None:
        """The first tag that begins at place or after it."""
        while (begin := self.text.find("<", place)) >= 0:
            name = _BEGIN.match(self.text, begin)
            end = self._end_of_tag(name.end()) if name else self._end_of_other(begin)
            if end:
                return Tag(self.text[begin:end], begin, end, name[1] if name else "")
            place = begin + 1
        return None

    def _end_of_tag(self, place: int) -> int:
        """The end of a tag whose name ends at place."""
        passed, end = [], 0
        while place not in self._ends:
            passed.append(place)
            special = _SPECIAL.search(self.text, place)
            if special is None or special[0] == "<":
                break
            if special[0] == ">":
                end = special.end()
                break
            place = self.text.find(special[0], special.end()) + 1
            if not place:  # the quote is not closed
                break
        else:
            end = self._ends[place]
        self._ends.update(dict.fromkeys(passed, end))
        return end

    def _end_of_other(self, begin: int) -> int:
        for opening, closing in _ENCLOSED:
            if self.text.startswith(opening, begin) and begin < self._absent.get(closing, len(self.text)):
                place = self.text.find(closing, begin + len(opening))
                if place >= 0:
                    return place + len(closing)
                self._absent[closing] = begin
        declaration = _DECLARATION.match(self.text, begin)
        return declaration.end() if declaration else 0
