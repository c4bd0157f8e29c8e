"""README's generated blocks: devices, three figures, the table of measurements, chips and versions.

A block is between `<!-- NAME: ... -->` and `<!-- end -->`. Every figure is the mean over all quiet shapes of its kind,
with the worst shape beside it.
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
from benchmarks.report import seeds
from benchmarks.report.rows import mean, quiet, suite
from fasttfm.errors import UserError

README = ROOT / "README.md"
_BLOCK = re.compile(r"(<!-- (status|figures|measured|chips): .*? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_LONGER_THAN_A_SAMPLE = 100
"""Chips with fewer compiled cases are only sampled."""
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
    """Our fastest provider over the fastest other, over all quiet shapes of a kind, on one machine in one dtype."""

    what: str
    machine: str
    cpu: bool
    mean: float
    worst: str
    shapes: int
    slower: int
    peers: tuple[str, ...]
    day: str
    """Date of the newest row."""


Kind = tuple[str, str, Callable[[pd.DataFrame], pd.Series]]
"""Title, group, and mask of its cases."""


def _attention_with_dropout(both: pd.DataFrame) -> pd.Series:
    return (both.case == "attention") & both["shape"].map(lambda shape: bool(shape.get("dropout")))


_SEARCH: Kind = ("Search", "decoding", lambda both: both.case == "paper-base")
_KINDS: tuple[Kind, ...] = (
    ("Attention with dropout", "kernels", _attention_with_dropout),
    ("Linear + cross entropy", "kernels", lambda both: both.case == "linear + cross entropy"),
    ("Training step", "training_step", lambda both: both.case != ""),
    _SEARCH,
)
"""Kinds on GPUs; on CPUs README has only searches and servers."""
_FIGURES = (
    ("Linear + cross entropy", "the loss with its projection, forward and backward"),
    ("Attention with dropout", "forward, backward"),
    ("Search, fp32", "whole translations, fp32"),
)


def lines(entries: Sequence[Entry]) -> list[Line]:
    """README's lines: GPUs, then searches and servers by class of CPU, newest first.

    Early records of CPUs without instruction sets are only in the report.
    """
    both = quiet(suite(entries))
    classed = both[both.cpu & both.machine.str.contains(" with ")]
    return [*_summaries(both[~both.cpu], _KINDS), *_summaries(classed, (_SEARCH,)), *_servers(entries)]


def _summaries(both: pd.DataFrame, kinds: Sequence[Kind]) -> Iterator[Line]:
    for what, group, cases in kinds:
        some = both[(both.group == group) & cases(both)].sort_values("time", ascending=False, kind="stable")
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
    """Requests per second at the highest load, of our fastest server over CTranslate2's."""
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
    """The devices that have run the kernels."""
    devices = sorted({machine_name(entry.machine) for entry in entries if not is_cpu(entry.machine)})
    if not devices:
        return "> **All times were measured on a CPU. No GPU has run these kernels.**"
    timed = f"Timed on {', '.join(devices)}; rows marked CPU were measured on a CPU."
    return f"> **{timed} No other device has run these kernels.**"


def figures(entries: Sequence[Entry]) -> str:
    """Three figures with their chips and peers, and everything that is slower."""
    all_lines = lines(entries)
    listed = []
    for what, after in _FIGURES:
        some = [line for line in all_lines if line.what.startswith(what)]
        peers = ", ".join(dict.fromkeys(peer for line in some for peer in line.peers))
        ratios = [f"**{line.mean:.2f}x** on {_short(line)}, worst shape {line.worst.split(':')[0]}" for line in some]
        listed += [f"- {what.split(',')[0]} ({after}), beside {peers}: {'; '.join(ratios)}"] if some else []
    slower = [f"{line.what.lower()} on {_short(line)} {line.mean:.2f}x" for line in all_lines if line.mean < 1]
    losses = "; ".join(slower) or "nothing measured"
    return "\n".join([*listed, f"- Slower than the fastest other: {losses}", *_trained(entries)])


def _short(line: Line) -> str:
    """Short name of the machine; with the date for CPUs, whose records differ in age."""
    name = line.machine.removeprefix("CPU: ").replace("(R)", "").replace(" Processor", "").removesuffix(", 2 cores")
    return f"{name} ({line.day})" if line.cpu else name.removesuffix(" 80GB HBM3")


def measured(entries: Sequence[Entry]) -> str:
    """Table of all lines."""
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
    """BLEU of the newest end-to-end run on Multi30k, and of the newest speedrun by several seeds."""
    runs = [
        entry
        for entry in entries
        if entry.kind == "end_to_end" and entry.record["corpus"] == "multi30k" and "test" not in entry.record
    ]
    speedruns = [each for each in seeds.means(entries) if "multi30k-fast" in each.command and each.test is None]
    texts = [
        f"- From text to a model: **{run.record['bleu']:.1f} BLEU** on Multi30k English-German after "
        f"{run.record['training_minutes']:.0f} minutes ({machine_name(run.machine)}, {str(run.machine['time'])[:10]}; "
        f"`{run.record['bleu_signature']}`)"
        for run in runs[-1:]
    ]
    for each in speedruns[-1:]:
        machine = each.runs[-1].machine
        texts.append(
            f"{'; the' if texts else '- From text to a model:'} [speedrun](docs/speedrun.md) on two CPU cores: "
            f"{each.words()}, validation set ({machine_name(machine)}, {str(machine['time'])[:10]})"
        )
    return ["".join(texts)] if texts else []


def chips(entries: Sequence[Entry]) -> str:
    """Table of chips with runs, executed cases and compiled cases, and the supported versions."""
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
    table = markdown(
        ["chip", "ran on it", "PTX executed on a CPU", "compiled"],
        [[", ".join(names), *cells] for cells, names in alike.items()],
    )
    return f"{table}\n\nOnly a sample is compiled for {', '.join(sampled)}. {_versions()}"


def _versions() -> str:
    """Versions allowed by setup.py and pinned by constraints.txt."""
    setup, pins = ((ROOT / name).read_text(encoding="utf-8") for name in ("setup.py", "constraints.txt"))
    minors = re.search(r"minor in range\((\d+), (\d+)\)", setup)
    if minors is None:
        raise UserError("setup.py has no range of Python versions")
    found = []
    for package in ("torch", "triton", "transformers"):
        oldest = re.search(rf'"{package}>=([\d.]+)', setup)
        pinned = re.search(rf"^{package}==([\d.]+)", pins, re.MULTILINE)
        found.append(f"{package} {oldest and oldest[1]} or newer ({pinned and pinned[1]} tested)")
    return f"Python 3.{minors[1]} to 3.{int(minors[2]) - 1}; {', '.join(found)}."


_MAKERS = {"status": notice, "figures": figures, "measured": measured, "chips": chips}


def updated(text: str, entries: Sequence[Entry]) -> str:
    """README with its blocks generated from the records. Raises UserError if a block is missing."""
    missing = {*_MAKERS} - {match[2] for match in _BLOCK.finditer(text)}
    if missing:
        raise UserError(f"README lacks the block {sorted(missing)[0]}: a line `<!-- NAME: ... -->`, and `<!-- end -->`")
    return _BLOCK.sub(lambda match: f"{match[1]}{_MAKERS[match[2]](entries)}\n{match[4]}", text)
