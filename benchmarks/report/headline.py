"""The figures that are claimed in public, each with the records that it was read from.

README's table (the few that matter most) and the report's list of all claims are made from these, so neither can say
what no record holds. A claim whose record is missing is left out. Every claim names the commit that was measured and
what the one who measured it noted, such as other jobs on the machine.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.end_to_end import CORPORA
from benchmarks.measure.providers import EAGER, OURS
from benchmarks.measure.result_files import Entry, Loaded, grouped, machine_name, shape_text, short_dtype
from benchmarks.measure.text_table import number

_MOST_ROWS = 4
"""Of one group on one machine: a headline, not the report."""

_LEADING_SHAPES = ({"batch": 32, "beam": 4, "length": 27}, {"padding": 0.05})
"""Of the throughput rows: whole sentences by beam search, and a training step on bucketed batches."""

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
        """As the record has it; its note stands apart."""
        return "; ".join(dict.fromkeys(_command(entry) for entry in self.entries))

    @property
    def origin(self) -> str:
        """The commits that were measured, those with changes marked, and the notes of who measured."""
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
    commit = str(entry.machine.get("commit") or "unknown")[:7]
    return f"{commit} with changes" if entry.machine.get("uncommitted_changes") else commit


def usable(entry: Entry) -> bool:
    """Whether a row of the suite may be claimed: timed, and not only to see that it runs."""
    return entry.timed and entry.record["level"] != "smoke"


def claims(files: Loaded) -> list[Claim]:
    """Everything that the records allow to be said, each with its machine, in the order of README's table."""
    parts = (_end_to_end, _groups, _workers, _overhead, _launches, _examples)
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
    newest = {group: machine_name(entry.machine) for group, entry in _latest(files.suite, "group").items()}
    for (group, machine, dtype), entries in parts.items():
        result = _speed_up(group, dtype, entries) if group in ("kernels", "blocks") else None
        for claim in result or _throughput(dtype, entries):
            yield claim if machine == newest[group] else replace(claim, leads=False)


def _speed_up(group: str, dtype: str, entries: Sequence[Entry]) -> Iterator[Claim]:
    ratios: list[float] = []
    used: list[Entry] = []
    for rows in by_case(entries):
        providers = {row.provider: row for row in rows}
        if OURS in providers and EAGER in providers:
            pair = (providers[OURS], providers[EAGER])
            ratios.append(pair[1].p50 / pair[0].p50)
            used += pair
    if not ratios:
        return
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    yield Claim(
        f"{len(ratios)} rows of {group}, {short_dtype(dtype)}, against plain PyTorch",
        f"{mean:.2f}x as fast (geometric mean; {min(ratios):.2f}x to {max(ratios):.2f}x)",
        tuple(used),
        leads=group == "kernels",
    )


def _throughput(dtype: str, entries: Sequence[Entry]) -> Iterator[Claim]:
    """Of every case the shapes that most providers ran, ours and the others' throughput side by side."""
    with_peers: dict[str, list[list[Entry]]] = {}
    for rows in by_case(entries):
        rows = [row for row in rows if row.record["throughput"]]
        ours = [row for row in rows if row.provider.startswith(OURS)]
        if ours and len(ours) < len(rows):
            with_peers.setdefault(rows[0].record["case"], []).append(rows)
    kept: list[list[Entry]] = []
    for shapes in with_peers.values():
        most = max(map(len, shapes))
        widest = [rows for rows in shapes if len(rows) == most]
        steps = min(_MOST_ROWS, len(widest))
        # the first, the last and some between, as the smallest and the largest batch
        kept += [widest[round(n * (len(widest) - 1) / max(steps - 1, 1))] for n in range(steps)]
    for rows in kept:
        record = rows[0].record
        best = sorted(rows, key=lambda row: -row.record["throughput"]["value"])
        figures = ", ".join(f"{row.provider} {number(row.record['throughput']['value'])}" for row in best)
        yield Claim(
            f"{record['case'].replace('_', ' ')}, {shape_text(record['shape'])}, {short_dtype(dtype)}",
            f"{figures} {record['throughput']['unit']}",
            tuple(rows),
            leads=any(all(record["shape"].get(k) == v for k, v in shape.items()) for shape in _LEADING_SHAPES),
        )


def _overhead(files: Loaded) -> Iterator[Claim]:
    for entry in files.of_kind("operator_overhead")[-1:]:
        result = entry.record["measured"]["fasttfm"]
        without, with_gradient = (result[f"{name}_gradient_us"]["quickest"] for name in ("without", "with"))
        yield Claim(
            "host time of an operator call, beyond its computation",
            f"{without:.1f} us, {with_gradient:.1f} us with a gradient",
            (entry,),
            leads=True,
        )


def _workers(files: Loaded) -> Iterator[Claim]:
    for entry in files.of_kind("workers")[-1:]:
        rows = entry.record["measured"]
        figures = [
            f"{row['workers']} x {row['threads']} {row['tokens_per_second']:,}" + " beside it" * bool(row["neighbours"])
            for row in sorted(rows, key=lambda row: (row["neighbours"], -row["workers"]))
        ]
        yield Claim(
            "training of multi30k, processes x threads on two cores, quiet and beside a busy program of low priority",
            f"{', '.join(figures)} target tokens/s",
            (entry,),
            leads=True,
        )


def _launches(files: Loaded) -> Iterator[Claim]:
    for entry in files.of_kind("launch_overhead")[-1:]:
        measured = entry.record["measured"].values()
        ours, tritons = ([of[way]["quickest"] for of in measured] for way in ("fasttfm", "triton"))
        yield Claim(
            "host time of a launch, before the driver starts the kernel",
            f"{min(ours):.1f} to {max(ours):.1f} us; Triton's own {min(tritons):.1f} to {max(tritons):.1f} us",
            (entry,),
        )


def _examples(files: Loaded) -> Iterator[Claim]:
    for entry in _latest(files.of_kind("example"), "example").values():
        errors = {name: error["mae"] for name, error in entry.record["errors"].items() if "mae" in error}
        if entry.record["example"] != "time_series" or not errors:
            continue
        (_, ours), *others = errors.items()
        yield Claim(
            "ETTh1 oil temperature, next day, held out",
            f"{ours:.3f} MAE ({', '.join(f'{name} {mae:.3f}' for name, mae in others)})",
            (entry,),
        )
