"""Block elements of HTML separate what is translated: each paragraph, list item, cell or heading by itself.

A line is cut at the tags of block elements, at <br>, and at elements that hold such (`<b><p>..</p></b>`); what lies
between is text with inline tags (markup.py). Scripts and style sheets are kept as they are.
Source: HTML Standard, section 15.3 (elements that are displayed as blocks, lists and tables).
"""

import re
from dataclasses import dataclass

from fasttfm.decoding.markup_tags import Tags
from fasttfm.errors import UserError

VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
"""HTML elements that are never closed."""

_BLOCK = re.compile(
    r"""
    address | article | aside | base | blockquote | body | br | button | caption | center | col | colgroup |
    dd | details | dialog | dir | div | dl | dt | fieldset | figcaption | figure | footer | form | h[1-6] |
    head | header | hgroup | hr | html | legend | li | link | main | menu | meta | nav | ol | optgroup |
    option | p | pre | search | section | select | style | script | summary | table | tbody | td | template |
    textarea | tfoot | th | thead | title | tr | ul
    """,
    re.VERBOSE | re.IGNORECASE,
)
_RAW = {name: re.compile(f"</{name}", re.IGNORECASE | re.ASCII) for name in ("script", "style")}
"""Elements whose content is not text, and what ends them."""


@dataclass(slots=True)
class _Open:
    """An element whose closing tag has not come."""

    name: str
    begin: int
    end: int
    is_block: bool


def split_blocks(line: str) -> list[str]:
    """Cut a line into pieces that together are the line: texts with inline tags, possibly empty, at even places, and
    between them boundaries, which nobody translates. UserError for tags that are not balanced."""
    boundaries: list[tuple[int, int]] = []
    open_elements = [_Open("", 0, 0, False)]  # the first one is around the whole line
    tags, place = Tags(line), 0
    while tag := tags.find(place):
        place, name = tag.end, tag.name
        is_block = _BLOCK.fullmatch(name) is not None or tag.text.startswith(("<!d", "<!D"))
        if tag.closes:
            element = open_elements.pop()
            if not open_elements or element.name != name:
                raise UserError(unbalanced(f"{tag.text} closes nothing that is open"))
            if element.name.lower() in _RAW:
                boundaries.append((element.begin, tag.end))
            elif element.is_block:
                boundaries += [(element.begin, element.end), (tag.begin, tag.end)]
            open_elements[-1].is_block |= element.is_block
        elif not name or tag.text.endswith("/>") or name.lower() in VOID:
            if is_block:
                boundaries.append((tag.begin, tag.end))
            open_elements[-1].is_block |= is_block
        else:
            open_elements.append(_Open(name, tag.begin, tag.end, is_block))
            if closing := _RAW.get(name.lower()):  # in which < begins no tag
                end = closing.search(line, place)
                place = end.start() if end else len(line)
    if len(open_elements) > 1:
        last = open_elements[-1]
        raise UserError(unbalanced(f"{line[last.begin : last.end]} is not closed"))
    return _pieces(line, sorted(boundaries))


def unbalanced(what: str) -> str:
    """The message about tags that are not balanced."""
    return f"{what}: with markup tags must be balanced, and < in text is written &lt;"


def _pieces(line: str, boundaries: list[tuple[int, int]]) -> list[str]:
    """Texts and boundaries in turns; boundaries with nothing but white space between them are one."""
    joined: list[tuple[int, int]] = []
    for begin, end in boundaries:
        if joined and not line[joined[-1][1] : begin].strip():
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    pieces, last = [], 0
    for begin, end in joined:
        pieces += [line[last:begin], line[begin:end]]
        last = end
    return [*pieces, line[last:]]
