"""README's generated blocks: what ran the kernels, three figures, a table of twelve lines, the chips and versions.

A block stands between `<!-- NAME: ... -->` and `<!-- end -->`. Every figure is a mean of all quiet shapes of its kind
beside its worst shape: README cannot show the best alone.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from benchmarks.measure.machine import ROOT, is_cpu, machine_name
from benchmarks.measure.records import RESULTS, Entry, read
from benchmarks.measure.text_table import markdown, short_dtype
from benchmarks.report.rows import mean, quiet, suite
from fasttfm.errors import UserError

README = ROOT / "README.md"
_BLOCK = re.compile(r"(<!-- (status|figures|measured|chips): .*? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_LONGER_THAN_A_SAMPLE = 100
"""Compile cases of a chip that is more than a sample of its relatives."""
_CHIPS = {
    "sm_60": "P100",
    "sm_70": "V100",
    "sm_75": "T4",
    "sm_80": "A100",
    "sm_86": "RTX 3090",
    "sm_89": "RTX 4090, L4",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_120": "RTX 5090",
    "gfx90a": "MI250",
    "gfx942": "MI300X",
    "gfx950": "MI350X",
}


@dataclass(frozen=True, slots=True)
class Line:
    """Our fastest way beside the fastest other in all quiet shapes of a kind, on one machine and in one dtype."""

    what: str
    machine: str
    cpu: bool
    mean: float
    worst: str
    shapes: int
    slower: int
    peers: tuple[str, ...]
    day: str
    """Of the newest row."""


Kind = tuple[str, str, Callable[[pd.DataFrame], pd.Series]]
"""Title, group, which of its cases."""


def _attention_with_dropout(both: pd.DataFrame) -> pd.Series:
    return (both.case == "attention") & both["shape"].map(lambda shape: bool(shape.get("dropout")))


_SEARCH: Kind = ("Search", "decoding", lambda both: both.case == "paper-base")
_KINDS: tuple[Kind, ...] = (
    ("Attention with dropout", "kernels", _attention_with_dropout),
    ("Linear + cross entropy", "kernels", lambda both: both.case == "linear + cross entropy"),
    ("Training step", "training_step", lambda both: both.case != ""),
    _SEARCH,
)
"""Of GPUs; of CPUs README has searches and servers alone."""
_FIGURES = (
    ("Linear + cross entropy", "the loss with its projection, forward and backward"),
    ("Attention with dropout", "forward, backward"),
    ("Search, fp32", "whole translations, fp32"),
)


def lines(entries: Sequence[Entry]) -> list[Line]:
    """README's lines: those of GPUs, then searches and servers of every kind of CPU, newest first.

    A CPU of an early record that names no instruction sets is of no kind: it stands in the report alone.
    """
    both = quiet(suite(entries))
    of_kinds = both[both.cpu & both.machine.str.contains(" with ")]
    return [*_summed_up(both[~both.cpu], _KINDS), *_summed_up(of_kinds, (_SEARCH,)), *_servers(entries)]


def _summed_up(both: pd.DataFrame, kinds: Sequence[Kind]) -> Iterator[Line]:
    for what, group, chosen in kinds:
        some = both[(both.group == group) & chosen(both)].sort_values("time", ascending=False, kind="stable")
        for (machine, dtype), part in some.groupby(["machine", "dtype"], sort=False):
            yield _line(what, str(machine), str(dtype), part)


def _line(what: str, machine: str, dtype: str, part: pd.DataFrame) -> Line:
    worst = part.loc[part.ratio.idxmin()]
    after = "" if worst["pass"] in ("decode", "step", "forward+backward") else f", {worst['pass']}"
    return Line(
        what=f"{what}, {short_dtype(dtype)}",
        machine=machine,
        cpu=bool(worst.cpu),
        mean=mean(part.ratio),
        worst=f"{worst.ratio:.2f}x: {worst.text}{after}; {worst.provider_other}",
        shapes=len(part),
        slower=int((part.ratio < 1).sum()),
        peers=tuple(Counter(re.split(r" int8|, ", name)[0] for name in part.provider_other)),
        day=str(part.time.max())[:10],
    )


def _servers(entries: Sequence[Entry]) -> Iterator[Line]:
    """Requests a second at the highest load that was tried, of our fastest server and of CTranslate2's."""
    served = {machine_name(entry.machine): entry for entry in entries if entry.kind == "open_loop"}
    for machine, entry in served.items():
        most = max(row["load"] for row in entry.record["measured"])
        rates = {row["provider"]: row["requests_per_second"] for row in entry.record["measured"] if row["load"] == most}
        theirs = rates.pop("CTranslate2")
        name, ours = max(rates.items(), key=lambda item: item[1])
        workers = entry.record["workers"]
        yield Line(
            what="Requests a second",
            machine=machine,
            cpu=True,
            mean=ours / theirs,
            worst=f"{ours / theirs:.2f}x: {name}, {workers} worker{'s' * (workers != 1)}; CTranslate2",
            shapes=1,
            slower=int(ours < theirs),
            peers=("CTranslate2",),
            day=str(entry.machine["time"])[:10],
        )


# --------------------------------------------------------------------------------------------------------------- blocks


def notice(entries: Sequence[Entry]) -> str:
    """The devices that have run the kernels, which a reader must know before any figure."""
    devices = sorted({machine_name(entry.machine) for entry in entries if not is_cpu(entry.machine)})
    if not devices:
        return "> **Every time here was measured on a CPU. No GPU has run these kernels.**"
    return f"> **Timed on {', '.join(devices)}; rows marked CPU on a CPU. No other device has run these kernels.**"


def figures(entries: Sequence[Entry]) -> str:
    """Three figures with their chips and peers, and what is slower."""
    made = lines(entries)
    listed = []
    for what, after in _FIGURES:
        some = [line for line in made if line.what.startswith(what)]
        peers = ", ".join(dict.fromkeys(peer for line in some for peer in line.peers))
        said = [f"**{line.mean:.2f}x** on {_short(line)}, worst shape {line.worst.split(':')[0]}" for line in some]
        listed += [f"- {what.split(',')[0]} ({after}), beside {peers}: {'; '.join(said)}"] if some else []
    slower = [f"{line.what.lower()} on {_short(line)} {line.mean:.2f}x" for line in made if line.mean < 1]
    losses = "; ".join(slower) or "nothing that was measured"
    return "\n".join([*listed, f"- Slower than the fastest other: {losses}", *_trained(entries)])


def _short(line: Line) -> str:
    """The machine in few words, with the day where it is a CPU: their records are of different ages."""
    name = line.machine.removeprefix("CPU: ").replace("(R)", "").replace(" Processor", "").removesuffix(", 2 cores")
    return f"{name} ({line.day})" if line.cpu else name.removesuffix(" 80GB HBM3")


def measured(entries: Sequence[Entry]) -> str:
    """The table, a line a kind and machine."""
    head = ["ours beside the fastest other", "machine", "times as fast", "worst shape", "slower", "measured"]
    cells = [
        [
            line.what,
            line.machine,
            f"{line.mean:.2f}x" if line.mean >= 1 else f"**{line.mean:.2f}x**",
            line.worst,
            f"{line.slower} of {line.shapes}",
            line.day,
        ]
        for line in lines(entries)
    ]
    return markdown(head, cells)


def _trained(entries: Sequence[Entry]) -> list[str]:
    """The score of a model trained from text by the recipe of Multi30k."""
    runs = [entry for entry in entries if entry.record.get("corpus") == "multi30k" and entry.kind == "end_to_end"]
    return [
        f"- From text to a model: **{run.record['bleu']:.1f} BLEU** on Multi30k English-German after "
        f"{run.record['training_minutes']:.0f} minutes ({machine_name(run.machine)}, {str(run.machine['time'])[:10]}; "
        f"`{run.record['bleu_signature']}`)"
        for run in runs[-1:]
    ]


def chips(entries: Sequence[Entry]) -> str:
    """Table of chips with their runs, executed and compiled cases, and of supported versions."""
    budgets = (ROOT / "kernels" / "proof" / "budgets.csv").read_text(encoding="utf-8").splitlines()[1:]
    compiled = Counter(row["chip"] for row in csv.DictReader(budgets))
    executed = {record["chip"]: record for record in read(RESULTS / "executed.jsonl")}
    ran: dict[str, set[str]] = {}
    for entry in entries:
        if not is_cpu(entry.machine):
            group = entry.record.get("group", entry.kind).replace("_", " ")
            ran.setdefault(entry.machine["chip"], set()).add(f"{group} ({machine_name(entry.machine).split()[1]})")
    alike: dict[tuple[str, ...], list[str]] = {}
    for chip, name in _CHIPS.items():
        record = executed.get(chip)
        cells = (
            ", ".join(sorted(ran.get(chip, ()))) or "not run",
            f"{record['passed']} of {record['cases']} cases" if record else "not executed",
            f"{compiled[chip]} cases",
        )
        alike.setdefault(cells, []).append(f"{name} ({chip})")
    sampled = [chip for chip, count in compiled.items() if count < _LONGER_THAN_A_SAMPLE]
    made = markdown(
        ["chip", "ran on it", "PTX executed on a CPU", "compiled"],
        [[", ".join(names), *cells] for cells, names in alike.items()],
    )
    return f"{made}\n\nA sample is compiled for {', '.join(sampled)}. {_versions()}"


def _versions() -> str:
    """The versions that setup.py allows and constraints.txt pins."""
    setup, pins = ((ROOT / name).read_text(encoding="utf-8") for name in ("setup.py", "constraints.txt"))
    minors = re.search(r"minor in range\((\d+), (\d+)\)", setup)
    if minors is None:
        raise UserError("setup.py names no versions of Python")
    found = []
    for package in ("torch", "triton", "transformers"):
        oldest = re.search(rf'"{package}>=([\d.]+)', setup)
        pinned = re.search(rf"^{package}==([\d.]+)", pins, re.MULTILINE)
        found.append(f"{package} {oldest and oldest[1]} or newer ({pinned and pinned[1]} tested)")
    return f"Python 3.{minors[1]} to 3.{int(minors[2]) - 1}; {', '.join(found)}."


_MAKERS = {"status": notice, "figures": figures, "measured": measured, "chips": chips}


def updated(text: str, entries: Sequence[Entry]) -> str:
    """README with its blocks as the records have them. Raises UserError where a block is missing."""
    missing = {*_MAKERS} - {found[2] for found in _BLOCK.finditer(text)}
    if missing:
        raise UserError(f"README lacks the block {sorted(missing)[0]}: a line `<!-- NAME: ... -->`, and `<!-- end -->`")
    return _BLOCK.sub(lambda found: f"{found[1]}{_MAKERS[found[2]](entries)}\n{found[4]}", text)
