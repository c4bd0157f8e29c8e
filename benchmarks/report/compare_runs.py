"""End-to-end records of two files side by side: what a model is worth and how fast it got there.

A record is one run with one seed, so nothing here has a significance: another seed may move the BLEU by about as much
as a change of the program does, and nothing in a record tells by how much. What changed is shown, never judged, and
does not touch the exit status; who wants to know trains with several seeds on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.measure.providers import OURS
from benchmarks.measure.result_files import Entry, Loaded, grouped, machine_name
from benchmarks.measure.text_table import aligned
from benchmarks.report.headline import corpus_and_peer

NO_SIGNIFICANCE = (
    "Each side is one run, and a record does not tell the spread between seeds: no difference here has a significance."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """The newest run of each side on one corpus."""

    before: Entry
    after: Entry
    older: int
    """Runs of the same that are left out, on both sides."""

    @property
    def name(self) -> str:
        names = [str(entry.record["corpus"]) for entry in (self.before, self.after)]
        if names[0] == names[1]:
            return names[0]
        corpus, _ = corpus_and_peer(names[0])
        return f"{corpus}: {' against '.join(corpus_and_peer(name)[1] or OURS for name in names)}"


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
    return [Pair(one[k][-1], other[k][-1], len(one[k]) + len(other[k]) - 2) for k in one if k in other]


def _rows(pair: Pair) -> list[tuple[str, ...]]:
    """Measure, before, after, change: scores by difference, times and speeds by ratio."""
    sides = [entry.record | entry.record.get("minutes_to_bleu", {}) for entry in (pair.before, pair.after)]
    targets = sorted({name for record in sides for name in record if name.isdigit()}, key=int)
    measures = [
        ("test BLEU", "bleu", ".2f", True),
        ("test chrF", "chrf", ".2f", True),
        ("minutes of training", "training_minutes", ".1f", False),
        *((f"minutes to {target} BLEU in validation", target, ".1f", False) for target in targets),
        ("updates", "updates", ",.0f", False),
        ("target tokens/s", "target_tokens_per_second", ",.0f", False),
        ("padding", "padding", ".1%", True),
        ("seconds to translate the test set", "translate_seconds", ".1f", False),
    ]
    rows = []
    for name, field, shown, difference in measures:
        before, after = (record.get(field) for record in sides)
        if before is None and after is None:
            continue
        change = ""
        if before is not None and after is not None:
            change = f"{after - before:+{shown}}" if difference else f"{after / before:.2f}x" if before else ""
        rows.append((name, *("" if v is None else f"{v:{shown}}" for v in (before, after)), change))
    return rows


def _differing(pair: Pair) -> list[str]:
    """What else than the program differs, so that it may be what made the difference."""
    result = []
    for words, value in (
        ("machines", lambda entry: machine_name(entry.machine)),
        ("training commands", lambda entry: entry.record["train_command"]),
        ("scores", lambda entry: entry.record["bleu_signature"]),
        ("versions of torch", lambda entry: entry.machine["torch"]),
    ):
        one, other = value(pair.before), value(pair.after)
        if one != other:
            result.append(f"{words} differ: {one} | {other}")
    return result


def text(result: Sequence[Pair]) -> str:
    """A table a corpus, what differs, and that none of it is significant."""
    parts = []
    for pair in result:
        if pair.before.record == pair.after.record:
            parts.append(f"{pair.name}: both sides hold the same run ({pair.before.location})")
            continue
        head = ("measure", f"before ({pair.before.location})", f"after ({pair.after.location})", "change")
        lines = [f"{pair.name}", aligned([head, *_rows(pair)], names=1), *_differing(pair)]
        if pair.older:
            lines.append(f"the newest run of each side; {pair.older} older left out")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, NO_SIGNIFICANCE])
