"""A report as blocks, and the two ways to write it down: one HTML page that needs nothing else, and Markdown.

Words in text and cells know `code` and **bold**; everything else is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from benchmarks.measure import text_table


@dataclass(frozen=True, slots=True)
class Text:
    words: str


@dataclass(frozen=True, slots=True)
class Notice:
    """What must not be overlooked."""

    words: str


@dataclass(frozen=True, slots=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    """Columns at the left that hold words; the others hold numbers."""
    folded: str = ""
    """Title of a table that is long and stands folded."""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    """Of the file beside the Markdown."""
    svg: str
    title: str
    note: str = ""
    """Machine, shape: what a title has no room for."""


@dataclass(frozen=True, slots=True)
class Cards:
    """Many small plots side by side; in Markdown the table that follows stands for them."""

    figures: Sequence[Figure]
    folded: str = ""


@dataclass(frozen=True, slots=True)
class Heading:
    words: str


Block = Text | Notice | Table | Figure | Cards | Heading


@dataclass(slots=True)
class Section:
    name: str
    """Its anchor."""
    title: str
    blocks: list[Block] = field(default_factory=list)


PAGE_STYLE = """
:root{--paper:#fcfcfa;--ink:#1b1f24;--muted:#5c6670;--rule:#d9dde1;--ours:#0a6c96;--floor:#b35c00;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e7eaed;--muted:#9ba6b1;--rule:#343c44;--ours:#4db8e0;
--floor:#f0a24a;--bad:#ff8a80}}
*{box-sizing:border-box}html{background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",
Roboto,"DejaVu Sans",sans-serif;color-scheme:light dark;scroll-padding-top:1rem}
body{max-width:1180px;margin:0 auto;padding:1.5rem clamp(.8rem,3vw,2rem) 5rem;overflow-wrap:break-word}
h1{font-size:1.9rem;line-height:1.15;margin:.2rem 0 .4rem}h2{font-size:1.35rem;margin:3rem 0 .6rem;padding-top:.7rem;
border-top:2px solid var(--ink)}h3{font-size:1.05rem;margin:1.8rem 0 .5rem}p{max-width:46rem;margin:.5rem 0}
a{color:var(--ours)}code{font:.88em ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
nav{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;margin:1.2rem 0;font-size:.93rem}
.notice{border-left:6px solid var(--floor);background:color-mix(in srgb,var(--floor) 13%,var(--paper));
padding:.7rem 1rem;margin:1rem 0;max-width:none;font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr));gap:1.4rem 2rem;margin:1rem 0}
figure{margin:0;min-width:0}figure.wide{margin:1.2rem 0;max-width:760px;overflow-x:auto}
figure.wide svg{min-width:370px}
figcaption{margin-bottom:.45rem;font-weight:600;line-height:1.3}figcaption small{display:block;font-weight:400;
color:var(--muted);font-size:.83rem}svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;margin:.8rem 0}.scroll:focus-visible{outline:2px solid var(--ours)}
table{border-collapse:collapse;font-size:.88rem;line-height:1.35;min-width:100%}
th,td{padding:.32rem .7rem;text-align:right;border-bottom:1px solid var(--rule);
vertical-align:top;white-space:nowrap;font-variant-numeric:tabular-nums}
th{border-bottom:2px solid var(--muted);vertical-align:bottom;color:var(--muted);font-weight:600}
.n{text-align:left}td.n{white-space:normal;overflow-wrap:anywhere;min-width:8rem}td.long{min-width:15rem}
tr.ours td{font-weight:600}tr.gone td{color:var(--muted)}
tr.wrong td{color:var(--bad)}summary{cursor:pointer;margin:.9rem 0 .3rem;color:var(--ours);font-weight:600}
footer{margin-top:4rem;color:var(--muted);font-size:.88rem}
@media print{details>*{display:block}nav{display:none}}
"""


def _inline(words: str) -> str:
    text = escape(words, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


_OURS = re.compile(r"fasttfm(, [a-z ]+)*")
"""A provider's cell; a figure that begins with the name holds digits."""


def _row_class(cells: Sequence[str]) -> str:
    """Rows of fasttfm stand out; rows without a time step back, wrong ones in red."""
    for kind, status in (("wrong", "wrong: "), ("gone", "refused: "), ("gone", "absent: ")):
        if any(cell.startswith(status) for cell in cells):
            return f' class="{kind}"'
    return ' class="ours"' if any(_OURS.fullmatch(cell) for cell in cells[1:6]) else ""


def _table_html(table: Table) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = (("n long" if len(v) > 40 else "n") if column < table.names else "" for column, v in enumerate(values))
        return "".join(
            f'<{tag} class="{kind}">{_inline(v)}</{tag}>' if kind else f"<{tag}>{_inline(v)}</{tag}>"
            for kind, v in zip(kinds, values)
        )

    body = "\n".join(f"<tr{_row_class(row)}>{cells('td', row)}</tr>" for row in table.rows)
    label = escape(table.folded or ", ".join(table.head[:3]))
    html = (
        f'<div class="scroll" role="region" tabindex="0" aria-label="Table: {label}"><table>\n'
        f"<thead><tr>{cells('th', table.head)}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
    return _fold(table.folded, html)


def _fold(title: str, html: str, opened: str = "") -> str:
    return f"<details{opened}><summary>{_inline(title)}</summary>\n{html}\n</details>" if title else html


def _figure_html(figure: Figure, kind: str = "") -> str:
    note = f"<small>{_inline(figure.note)}</small>" if figure.note else ""
    return f"<figure{kind}><figcaption>{_inline(figure.title)}{note}</figcaption>\n{figure.svg}\n</figure>"


def _block_html(block: Block) -> str:
    if isinstance(block, Text):
        return f"<p>{_inline(block.words)}</p>"
    if isinstance(block, Notice):
        return f'<p class="notice">{_inline(block.words)}</p>'
    if isinstance(block, Heading):
        return f"<h3>{_inline(block.words)}</h3>"
    if isinstance(block, Table):
        return _table_html(block)
    if isinstance(block, Figure):
        return _figure_html(block, ' class="wide"')
    cards = "\n".join(_figure_html(figure) for figure in block.figures)
    return _fold(block.folded, f'<div class="cards">\n{cards}\n</div>', " open")


def html(title: str, lead: Sequence[Block], sections: Sequence[Section]) -> str:
    """The page."""
    links = "".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections)
    parts = []
    for section in sections:
        blocks = "\n".join(_block_html(block) for block in section.blocks)
        parts.append(f'<section id="{section.name}">\n<h2>{_inline(section.title)}</h2>\n{blocks}\n</section>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{PAGE_STYLE}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(_block_html(block) for block in lead)
        + f'\n</header>\n<nav aria-label="Sections">{links}</nav>\n<main>\n'
        + "\n".join(parts)
        + "\n</main>\n<footer>Written by <code>python -m benchmarks report</code> from the records in "
        "<code>benchmarks/results</code>: the same records give the same page.</footer>\n</body>\n</html>\n"
    )


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


def _block_markdown(block: Block) -> str:
    if isinstance(block, Text):
        return block.words
    if isinstance(block, Notice):
        return f"> **{block.words}**"
    if isinstance(block, Heading):
        return f"### {block.words}"
    if isinstance(block, Figure):
        note = f"\n\n{block.note}" if block.note else ""
        return f"**{block.title}**{note}\n\n![{block.title}](figures/{block.name}.svg)"
    if isinstance(block, Table):
        head, *rows = ([_cell(cell) for cell in row] for row in (block.head, *block.rows))
        title = f"{block.folded}:\n\n" if block.folded else ""
        return title + text_table.markdown(head, rows, names=block.names)
    return ""


def markdown(title: str, lead: Sequence[Block], sections: Sequence[Section]) -> str:
    """The same as text; figures are files beside it, small plots are left to the page."""
    blocks = [*lead, *(b for section in sections for b in (Heading(section.title), *section.blocks))]
    names = {section.title for section in sections}
    written = []
    for block in blocks:
        text = f"## {block.words}" if isinstance(block, Heading) and block.words in names else _block_markdown(block)
        if text:
            written.append(text)
    return f"# {title}\n\n" + "\n\n".join(written) + "\n"


def figures(lead: Sequence[Block], sections: Sequence[Section]) -> list[Figure]:
    """Those that the Markdown shows."""
    return [b for blocks in (lead, *(s.blocks for s in sections)) for b in blocks if isinstance(b, Figure)]
