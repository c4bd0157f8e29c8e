"""End-to-end records of two files side by side: what a model is worth and how fast it got there.

A record is one run with one seed, so nothing here has a significance: another seed may move the BLEU by about as much
as a change of the program does, and nothing in a record tells by how much. What changed is shown, never judged, and
does not touch the exit status; who wants to know trains with several seeds on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.measure.machine import machine_name
from benchmarks.measure.providers import OURS
from benchmarks.measure.result_files import Entry, Loaded, grouped
from benchmarks.measure.text_table import aligned
from benchmarks.report.headline import corpus_and_peer

NO_SIGNIFICANCE = (
    "Each side is one run, and a record does not tell the spread between seeds: no difference here has a significance."
)
Pair = tuple[Entry, Entry, int]
"""The newest run of each side, and how many older ones are left out."""
_MEASURES = {
    "bleu": ("test BLEU", "+.2f"),
    "chrf": ("test chrF", "+.2f"),
    "training_minutes": ("minutes of training", ".1f"),
    "updates": ("updates", ",.0f"),
    "target_tokens_per_second": ("target tokens/s", ",.0f"),
    "padding": ("padding", "+.1%"),
    "translate_seconds": ("seconds to translate the test set", ".1f"),
}
"""Field -> its name and format; + where the change is a difference, else it is a ratio."""


def pairs(before: Loaded, after: Loaded) -> list[Pair]:
    """Runs on the same corpus by the same trainer; where there are none, each side's only run on the same corpus."""
    result = _paired(before, after, lambda entry: str(entry.record["corpus"]))
    alone = len(before.of_kind("end_to_end")) == len(after.of_kind("end_to_end")) == 1
    return result or (_paired(before, after, lambda e: corpus_and_peer(e.record["corpus"])[0]) if alone else [])


def _paired(before: Loaded, after: Loaded, key: Callable[[Entry], str]) -> list[Pair]:
    one, other = (
        grouped(sorted(files.of_kind("end_to_end"), key=lambda entry: str(entry.machine["time"])), key)
        for files in (before, after)
    )
    return [(one[k][-1], other[k][-1], len(one[k]) + len(other[k]) - 2) for k in one if k in other]


def _rows(*entries: Entry) -> list[tuple[str, ...]]:
    """Measure, before, after, change."""
    sides = [entry.record | entry.record.get("minutes_to_bleu", {}) for entry in entries]
    targets = sorted({name for record in sides for name in record if name.isdigit()}, key=int)
    rows = []
    for field, (name, shown) in (
        _MEASURES | {target: (f"minutes to {target} BLEU in validation", ".1f") for target in targets}
    ).items():
        values = [record.get(field) for record in sides]
        cells = ["" if value is None else f"{value:{shown.lstrip('+')}}" for value in values]
        before, after = values
        if before is None or after is None:
            change = ""
        elif shown.startswith("+"):
            change = f"{after - before:{shown}}"
        else:
            change = f"{after / before:.2f}x" if before else ""
        rows += [(name, *cells, change)] if any(cells) else []
    return rows


def _text(before: Entry, after: Entry, older: int) -> str:
    names = [str(entry.record["corpus"]) for entry in (before, after)]
    corpus, _ = corpus_and_peer(names[0])
    sides = " against ".join(corpus_and_peer(name)[1] or OURS for name in names)
    title = names[0] if names[0] == names[1] else f"{corpus}: {sides}"
    if before.record == after.record:
        return f"{title}: both sides hold the same run ({before.location})"
    head = ("measure", f"before ({before.location})", f"after ({after.location})", "change")
    lines = [title, aligned([head, *_rows(before, after)], names=1)]
    for words, value in (  # what else than the program may have made the difference
        ("machines", lambda entry: machine_name(entry.machine)),
        ("training commands", lambda entry: entry.record["train_command"]),
        ("scores", lambda entry: entry.record["bleu_signature"]),
        ("versions of torch", lambda entry: entry.machine["torch"]),
    ):
        if value(before) != value(after):
            lines.append(f"{words} differ: {value(before)} | {value(after)}")
    return "\n".join([*lines, *([f"the newest run of each side; {older} older left out"] if older else [])])


def text(result: Sequence[Pair]) -> str:
    """A table a corpus, what differs, and that none of it is significant."""
    return "\n\n".join([*(_text(*pair) for pair in result), NO_SIGNIFICANCE])
