"""The figures that are claimed in public, each with the records that it was read from.

README's table (the few that matter most) and the report's list of all claims are made from these, so neither can say
what no record holds. A claim whose record is missing is left out. Every claim names the commit that was measured and
what the one who measured it noted, such as other jobs on the machine.
"""

import itertools
import json
import re
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.end_to_end import CORPORA
from benchmarks.measure.machine import is_cpu, machine_name, noisy, spread
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import Entry, Loaded, grouped
from benchmarks.measure.text_table import duration, short_dtype

_SUMMED_UP = {
    "kernels": "kernels",
    "blocks": "layers",
    "training_step": "training steps",
    "decoding": "searches with paper-base",
}
"""Groups of which all shapes together are claimed, not some of them."""

_LEADING = ("kernels", "training_step")
"""Those whose sum leads; of the searches every shape does (grid())."""

_MOST_NOISY = 0.25
"""Share of a group's cases that may be noisy on the machine whose figures lead."""

_MOST_OFF = 0.1
"""Difference of a cell's machine speed from its table's that goes without a remark."""

_CORPORA = {
    "multi30k": "Multi30k English-German",
    "tatoeba-enja": "Tatoeba English-Japanese",
    "demo": "`make demo`, held-out sentences",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure and where it stands; Markdown."""

    what: str
    figure: str
    entries: tuple[Entry, ...]
    leads: bool = False
    """Whether it is one of the few in README."""

    @property
    def command(self) -> str:
        """The command in the record; its note stands apart."""
        return "; ".join(dict.fromkeys(_command(entry) for entry in self.entries))

    @property
    def origin(self) -> str:
        """The commits that were measured and when, those with changes marked, and the notes of who measured."""
        commits = dict.fromkeys(_commit(entry) for entry in self.entries)
        notes = dict.fromkeys(str(entry.record["note"]) for entry in self.entries if entry.record.get("note"))
        return "; ".join([", ".join(commits), *notes])

    @property
    def locations(self) -> str:
        """File and line; of many lines of a file, how many."""
        return ", ".join(
            f"{name}:{','.join(str(e.line) for e in members)}"
            if len(members) <= 4
            else f"{name} ({len(members)} lines)"
            for name, members in grouped(self.entries, lambda entry: entry.file).items()
        )


def _command(entry: Entry) -> str:
    command = str(entry.machine["command"]).split(" --note ")[0]
    # records of before November 2026 lack the quotes that a shell needs around --only's text
    return re.sub(r"--only (?!['\"])(\S+(?: \S+)+?)(?= --|$)", lambda m: f"--only {shlex.quote(m[1])}", command)


def _commit(entry: Entry) -> str:
    commit = f"{str(entry.machine.get('commit') or 'unknown')[:7]} of {str(entry.machine['time'])[:10]}"
    return f"{commit} with changes" if entry.machine.get("uncommitted_changes") else commit


def usable(entry: Entry) -> bool:
    """Return whether a row of the suite may be claimed if it is quiet: timed, and not only to see that it runs."""
    return entry.timed and entry.record["level"] != "smoke"


def _quiet(rows: Sequence[Entry]) -> bool:
    """Return whether a case may be claimed: without its noisy row the others would look better than they are."""
    return not any(noisy(row.record) for row in rows)


def plus_minus(entries: Sequence[Entry]) -> str:
    """Half of p20 to p80 as a share of the median, of several rows the median of theirs."""
    share = statistics.median(spread(entry.record["time_us"]) for entry in entries) / 2
    return f"±{share:.0%}" if share >= 0.01 else f"±{share:.1%}"


def claims(files: Loaded) -> list[Claim]:
    """Everything that the records allow to be said, each with its machine, in the order of README's table."""
    parts = (_end_to_end, _groups, _overhead, _forecasts)
    return [_with_machine(claim) for part in parts for claim in part(files)]


def _with_machine(claim: Claim) -> Claim:
    machines = dict.fromkeys(machine_name(entry.machine) for entry in claim.entries)
    return replace(claim, what="; ".join([claim.what, *machines]))


def _latest(entries: Sequence[Entry], name: str) -> dict[str, Entry]:
    """The newest record for each value of a field."""
    by_time = sorted(entries, key=lambda entry: str(entry.machine["time"]))
    return {str(entry.record[name]): entry for entry in by_time}


def corpus_and_peer(name: str) -> tuple[str, str]:
    """ "multi30k, torch.nn" is multi30k with that trainer; ours goes without a name."""
    corpus, _, peer = name.partition(", ")
    return corpus, peer


def _order(name: str) -> tuple[int, str]:
    corpus, _ = corpus_and_peer(name)
    return [*_CORPORA, corpus].index(corpus), name


def _end_to_end(files: Loaded) -> Iterator[Claim]:
    for name, entry in sorted(_latest(files.of_kind("end_to_end"), "corpus").items(), key=lambda item: _order(item[0])):
        corpus, peer = corpus_and_peer(name)
        record = entry.record
        test = f", `{CORPORA[corpus].test}`" if corpus in CORPORA and CORPORA[corpus].test != "test" else ""
        threads = re.search(r"--threads (\d+)", record["train_command"])
        cores = f" on {threads[1]} core{'s' * (threads[1] != '1')}" if threads else ""
        signature = record["bleu_signature"].removeprefix("BLEU|").replace("|", "\\|")
        lower = record.get("bleu_lowercase")
        lower_text = (
            f", {lower:.2f} lower-cased" if lower is not None and f"{lower:.2f}" != f"{record['bleu']:.2f}" else ""
        )
        yield Claim(
            f"{_CORPORA.get(corpus, corpus)}, {record['updates']:,} updates in {record['training_minutes']:.1f} minutes"
            f"{cores}{f', with a plain {peer} trainer' if peer else ''}{test}",
            f"{record['bleu']:.2f} cased sacreBLEU (`{signature}`){lower_text}",
            (entry,),
            leads=name == "multi30k",
        )
        yield Claim(
            f"{_CORPORA.get(corpus, corpus)}{f' by a plain {peer} trainer' if peer else ''}: training speed, "
            f"{record['padding']:.1%} padding",
            f"{record['target_tokens_per_second']:,} target tokens/s",
            (entry,),
        )


def by_case(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Rows of one case, shape, dtype and pass together, in the order in which they stand."""
    same = ("case", "shape", "dtype", "pass")
    return list(grouped(entries, lambda entry: json.dumps([entry.record[field] for field in same])).values())


def _groups(files: Loaded) -> Iterator[Claim]:
    parts = grouped(
        filter(usable, files.suite), lambda e: (e.record["group"], machine_name(e.machine), e.record["dtype"])
    )
    for (group, machine, dtype), entries in parts.items():
        leads = group in _LEADING and machine == leading_machine(files, group)
        for claim in _speed_up(group, dtype, entries):
            yield replace(claim, leads=claim.leads and leads)


def leading_machine(files: Loaded, group: str, cpu: bool | None = None) -> str | None:
    """The machine that was measured last, of those on which few cases of the group are noisy, a GPU before any CPU.

    cpu: of CPUs alone, or of GPUs alone; None: of all.
    """
    newest: dict[str, tuple[bool, str]] = {}
    rows = (entry for entry in files.suite if usable(entry) and entry.record["group"] == group)
    rows = (entry for entry in rows if cpu in (None, is_cpu(entry.machine)))
    machines = grouped(rows, lambda entry: machine_name(entry.machine))
    for machine, entries in machines.items():
        cases = by_case(entries)
        if sum(not _quiet(rows) for rows in cases) <= _MOST_NOISY * len(cases):
            newest[machine] = (not is_cpu(entries[0].machine), max(str(entry.machine["time"]) for entry in entries))
    return max(newest, key=newest.__getitem__, default=None)


def _speed_up(group: str, dtype: str, entries: Sequence[Entry]) -> Iterator[Claim]:
    """All shapes of a group together: our fastest provider against the fastest of the others, shape by shape."""
    if group not in _SUMMED_UP:
        return
    ratios: list[float] = []
    used: list[Entry] = []
    left_out = 0
    for rows in by_case(entries):
        ours = [row for row in rows if row.provider.startswith(OURS)]
        others = [row for row in rows if row not in ours]
        if ours and others and (group != "decoding" or rows[0].record["case"] == "paper-base"):
            if not _quiet(rows):
                left_out += 1
                continue
            pair = [min(ours, key=lambda row: row.p50), min(others, key=lambda row: row.p50)]
            ratios.append(pair[1].p50 / pair[0].p50)
            used += pair
    if not ratios:
        return
    mean = statistics.geometric_mean(ratios)
    lost = sum(ratio < 1 for ratio in ratios)
    yield Claim(
        f"{len(ratios)} shapes of {_SUMMED_UP[group]}, {short_dtype(dtype)}, our fastest way{_named(used[::2])} "
        f"against the fastest other{_named(used[1::2])}",
        f"{mean:.2f}x as fast (geometric mean; {min(ratios):.2f}x to {max(ratios):.2f}x), slower in {lost}; times "
        f"{plus_minus(used)}{f'; {left_out} noisy shapes left out' if left_out else ''}",
        tuple(used),
        leads=True,
    )


def _named(rows: Sequence[Entry]) -> str:
    """The provider in brackets, where one is the fastest everywhere: a graph beside eager steps is to be seen."""
    return f" ({rows[0].provider})" if len({row.provider for row in rows}) == 1 and rows[0].provider != OURS else ""


def searches(files: Loaded) -> list[Entry]:
    """Rows of whole translations with paper-base, those with wrong results too."""
    rows = (entry for entry in files.suite if usable(entry) or _wrong(entry))
    return [entry for entry in rows if (entry.record["group"], entry.record["case"]) == ("decoding", "paper-base")]


def _wrong(entry: Entry) -> bool:
    return entry.record["status"] == "wrong" and entry.record["level"] != "smoke"


def grid_note(entries: Sequence[Entry]) -> str:
    """The words above their grid()."""
    note = "Each tool's fastest way, ± half of p20 to p80; **bold** where ours is not the fastest; int8 counts as "
    note += "a way below fp32."
    if any(_wrong(entry) for entry in entries):
        note += " Wrong: the log-probability of what it finds is not that of a search in float64 (1e-5 off in fp32, 5% "
        note += "below)."
    if any(map(_off, by_case(entries), itertools.repeat(_speed(entries)))):
        note += " Machine at N%: how fast all cores multiplied just after a cell's runs, of the table's median."
    return note


def grid(entries: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of one machine's searches: a line a tool; down batches, lengths and vocabularies other than the
    smallest, across beams and dtypes."""
    cells = grouped(entries, _place)
    downs = sorted({down for down, _ in cells})
    acrosses = sorted({across for _, across in cells}, key=lambda across: (across[1] != "float32", across))
    head = ["sentences × words", *(f"beam {beam}, {short_dtype(dtype)}" for beam, dtype in acrosses)]
    usual, speed = downs[0][0] if downs else 0, _speed(entries)
    rows = []
    for down in downs:
        vocabulary, length, batch = down
        size = "" if vocabulary == usual else f", vocabulary {vocabulary:,}"
        found = (cells.get((down, across), []) for across in acrosses)
        rows.append([f"{batch} × {length}{size}", *(_cell(of_cell, speed) for of_cell in found)])
    return head, rows


def _place(entry: Entry) -> tuple[tuple[int, int, int], tuple[int, str]]:
    shape = entry.record["shape"]
    return (shape["vocabulary"], shape["length"], shape["batch"]), (shape["beam"], entry.record["dtype"])


def _speed(rows: Sequence[Entry]) -> float | None:
    """The median of how fast the machine was then; None where no record tells it."""
    told = [(row.record.get("load") or {}).get("gflop_per_s") for row in rows]
    return statistics.median(known) if (known := [each for each in told if each]) else None


def _off(rows: Sequence[Entry], usual: float | None) -> str:
    """A remark where the machine was faster or slower than usual, so that these times stand beside others wrongly."""
    share = speed / usual if usual and (speed := _speed(rows)) else 1.0
    return f"(machine at {share:.0%})" if abs(share - 1) > _MOST_OFF else ""


def _cell(rows: Sequence[Entry], speed: float | None) -> str:
    """The fastest row of each tool; speed: the table's."""
    if not rows:
        return ""
    timed, wrong = [row for row in rows if row.timed], [row for row in rows if not row.timed]
    if not _quiet(timed):
        return "too noisy to say"
    tools = grouped(sorted(timed, key=lambda row: row.p50), _tool)
    lines = {tool: f"{tool} {duration(best.p50)} {plus_minus([best])}" for tool, (best, *_) in tools.items()}
    lines |= {tool: f"{tool} wrong" for tool in map(_tool, wrong) if tool not in lines}
    if OURS in lines and next(iter(lines)) != OURS:
        lines[OURS] = f"**{lines[OURS]}**"
    ordered = [lines[tool] for tool in sorted(lines, key=lambda tool: tool != OURS)]
    return "<br>".join(filter(None, [*ordered, _off(rows, speed)]))


def _tool(row: Entry) -> str:
    return re.split(r" int8|, ", row.provider)[0]


def _overhead(files: Loaded) -> Iterator[Claim]:
    for entry in files.of_kind("operator_overhead")[-1:]:
        result = entry.record["measured"]["fasttfm"]
        without, with_gradient = (result[f"{name}_gradient_us"]["quickest"] for name in ("without", "with"))
        yield Claim(
            "host time of an operator call, beyond its computation",
            f"{without:.1f} us, {with_gradient:.1f} us with a gradient",
            (entry,),
        )


def _forecasts(files: Loaded) -> Iterator[Claim]:
    for entry in files.of_kind("time_series")[-1:]:
        errors = {name: error["mae"] for name, error in entry.record["errors"].items() if "mae" in error}
        (_, ours), *others = errors.items()
        yield Claim(
            "ETTh1 oil temperature, next day, held out",
            f"{ours:.3f} MAE ({', '.join(f'{name} {mae:.3f}' for name, mae in others)})",
            (entry,),
        )
