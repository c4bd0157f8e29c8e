"""A report as blocks, written down as Markdown; the documentation's site makes a page of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.measure import text_table


@dataclass(frozen=True, slots=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    """Columns at the left that hold words; the others hold numbers."""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    """Of the file beside the Markdown."""
    svg: str
    title: str
    note: str = ""
    """Machine, shape: what a title has no room for."""


Block = str | Table | Figure
"""A string is a paragraph; "### " begins a heading, "> " what must not be overlooked."""


@dataclass(slots=True)
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


def _block(block: Block) -> str:
    if isinstance(block, Figure):
        note = f"\n\n{block.note}" if block.note else ""
        return f"**{block.title}**{note}\n\n![{block.title}](figures/{block.name}.svg)"
    if isinstance(block, Table):
        head, *rows = ([_cell(cell) for cell in row] for row in (block.head, *block.rows))
        title = f"{block.title}:\n\n" if block.title else ""
        return title + text_table.markdown(head, rows, names=block.names)
    return block


def markdown(title: str, lead: Sequence[Block], sections: Sequence[Section]) -> str:
    """The report; its figures are files in figures/ beside it."""
    blocks = [f"# {title}", *lead, *(b for section in sections for b in (f"## {section.title}", *section.blocks))]
    return "\n\n".join(map(_block, blocks)) + "\n"


def figures(sections: Sequence[Section]) -> list[Figure]:
    return [block for section in sections for block in section.blocks if isinstance(block, Figure)]
