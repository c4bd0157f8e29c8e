"""Tables of the report: searches by size and beam, and every case of a group."""

import re

import pandas as pd

from benchmarks.measure.providers import OURS
from benchmarks.measure.text_table import duration, number, short_dtype
from benchmarks.report.headline import plus_minus
from benchmarks.report.rows import CASE, duels

Table = tuple[list[str], list[list[str]]]
"""Head and rows."""
_MOST_OFF = 0.1
"""Difference of a cell's machine speed from its table's that goes without a remark."""
_NOISY = "too noisy to say"


# ------------------------------------------------------------------------------------------------------------ searches


def searches(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of whole translations with paper-base, those with wrong results too."""
    wrong = (rows.status == "wrong") & (rows.level != "smoke")
    result = rows[(rows.usable | wrong) & (rows.group == "decoding") & (rows.case == "paper-base")]
    return result.assign(
        **{name: [shape[name] for shape in result["shape"]] for name in ("beam", "batch", "length", "vocabulary")}
    )


def searches_note(rows: pd.DataFrame) -> str:
    """The words above their grid()."""
    note = "Each tool's fastest way, ± half of p20 to p80; **bold** where ours is not the fastest; int8 counts as "
    note += "a way below fp32."
    if (rows.status == "wrong").any():
        note += " Wrong: the log-probability of what it finds is not that of a search in float64 (1e-5 off in fp32, 5% "
        note += "below)."
    speed = rows.gflop_per_s.median()
    if any(_off(cell, speed) for _, cell in rows.groupby(CASE)):
        note += " Machine at N%: how fast all cores multiplied just after a cell's runs, of the table's median."
    return note


def grid(rows: pd.DataFrame) -> Table:
    """One machine's searches: a line a tool; down batches, lengths and vocabularies other than the smallest, across
    beams and dtypes."""
    speed, usual = rows.gflop_per_s.median(), rows.vocabulary.min()
    cells = {
        place: _cell(cell, speed) for place, cell in rows.groupby(["vocabulary", "length", "batch", "beam", "dtype"])
    }
    downs = sorted({place[:3] for place in cells})
    acrosses = sorted({place[3:] for place in cells}, key=lambda across: (across[1] != "float32", across))
    head = ["sentences × words", *(f"beam {beam}, {short_dtype(dtype)}" for beam, dtype in acrosses)]
    lines = []
    for vocabulary, length, batch in downs:
        size = "" if vocabulary == usual else f", vocabulary {vocabulary:,}"
        cells_of_line = [cells.get((vocabulary, length, batch, *across), "") for across in acrosses]
        lines.append([f"{batch} × {length}{size}", *cells_of_line])
    return head, lines


def _off(rows: pd.DataFrame, usual: float) -> str:
    """A remark where the machine was faster or slower than usual, so that these times stand beside others wrongly."""
    share = rows.gflop_per_s.median() / usual
    return f"(machine at {share:.0%})" if abs(share - 1) > _MOST_OFF else ""


def _cell(rows: pd.DataFrame, speed: float) -> str:
    """The fastest row of each tool; speed: the table's."""
    timed = rows[rows.status == "timed"].sort_values("p50", kind="stable")
    if timed.noisy.any():
        return _NOISY
    lines: dict[str, str] = {}
    for row in timed.itertuples():
        lines.setdefault(_tool(row.provider), f"{_tool(row.provider)} {duration(row.p50)} {plus_minus(row.spread)}")
    for provider in rows[rows.status == "wrong"].provider:
        lines.setdefault(_tool(provider), f"{_tool(provider)} wrong")
    if OURS in lines and next(iter(lines)) != OURS:
        lines[OURS] = f"**{lines[OURS]}**"
    ordered = [lines[tool] for tool in sorted(lines, key=lambda tool: tool != OURS)]
    return "<br>".join(filter(None, [*ordered, _off(rows, speed)]))


def _tool(provider: str) -> str:
    return re.split(r" int8|, ", provider)[0]


# ---------------------------------------------------------------------------------------------------------------- cases


def cases(rows: pd.DataFrame) -> Table:
    """A line a case of a group: our fastest way, the fastest other, what is left to the device's limit, memory."""
    head = ["case", "pass", "ours", "fastest other", "ratio", "of limit", "MiB", "MiB, other"]
    lines = []
    for duel in duels(rows).to_dict("records"):
        way = duel["provider"].removeprefix(OURS).strip(", ")
        ours = f"{duration(duel['p50'])} {plus_minus(duel['spread'])}{f', {way}' if way else ''}"
        alone = duel["ratio"] != duel["ratio"]
        lines.append(
            [
                f"{duel['case']} {duel['text']}",
                duel["pass"],
                f"**{ours}**" if duel["ratio"] < 1 else ours,
                "" if alone else f"{duel['provider_other']} {duration(duel['p50_other'])}",
                "" if alone else f"{duel['ratio']:.2f}x{', noisy' if duel['noisy'] else ''}",
                "" if duel["share"] != duel["share"] else f"{duel['share']:.0%}" if duel["share"] >= 0.01 else "<1%",
                *("" if value != value else number(value) for value in (duel["mib"], duel["mib_other"])),
            ]
        )
    return head, lines
