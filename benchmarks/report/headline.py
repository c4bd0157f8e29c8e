"""The figures that are claimed in public, each with the records that it was read from.

The report's lists of claims are made from these, so they cannot say what no record holds. A claim whose record is
missing is left out. Every claim names the commit that was measured and the notes of whoever measured it, such as other
jobs on the machine.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from benchmarks.end_to_end import CORPORA
from benchmarks.measure.machine import machine_name
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import Entry
from benchmarks.measure.text_table import short_dtype
from benchmarks.report.rows import duels, suite

_SUMMED_UP = {
    "kernels": "kernels",
    "blocks": "layers",
    "training_step": "training steps",
    "decoding": "searches with paper-base",
}
"""Groups of which all shapes together are claimed, not some of them."""
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

    @property
    def locations(self) -> str:
        """File and line; of many lines of a file, how many."""
        lines: dict[str, list[int]] = {}
        for entry in self.entries:
            lines.setdefault(entry.file, []).append(entry.line)
        return ", ".join(
            f"{name} ({len(numbers)} lines)" if len(numbers) > 4 else f"{name}:{','.join(map(str, numbers))}"
            for name, numbers in lines.items()
        )


def origin(entries: Sequence[Entry]) -> str:
    """The commits that were measured and when, those with changes marked, and the notes of who measured."""
    commits = dict.fromkeys(_commit(entry) for entry in entries)
    notes = dict.fromkeys(str(entry.record["note"]) for entry in entries if entry.record.get("note"))
    return "; ".join([", ".join(commits), *notes])


def _commit(entry: Entry) -> str:
    commit = f"{str(entry.machine.get('commit') or 'unknown')[:7]} of {str(entry.machine['time'])[:10]}"
    return f"{commit} with changes" if entry.machine.get("uncommitted_changes") else commit


def plus_minus(spreads: float | pd.Series) -> str:
    """Half of p20 to p80 as a share of the median, of several rows the median of theirs."""
    share = np.median(spreads) / 2
    return f"±{share:.0%}" if share >= 0.01 else f"±{share:.1%}"


def claims(entries: Sequence[Entry]) -> list[Claim]:
    """Everything that the records allow to be said, each with its machine."""
    made = [*_end_to_end(entries), *_groups(suite(entries)), *_forecasts(entries)]
    machines = (dict.fromkeys(machine_name(entry.machine) for entry in claim.entries) for claim in made)
    return [replace(claim, what="; ".join([claim.what, *names])) for claim, names in zip(made, machines)]


def _end_to_end(entries: Sequence[Entry]) -> Iterator[Claim]:
    runs = sorted((e for e in entries if e.kind == "end_to_end"), key=lambda entry: str(entry.machine["time"]))
    newest = {entry.record["corpus"]: entry for entry in runs}

    def place(name: str) -> tuple[int, str]:
        corpus = name.split(", ")[0]
        return [*_CORPORA, corpus].index(corpus), name

    for name in sorted(newest, key=place):
        corpus, _, peer = name.partition(", ")  # "multi30k, torch.nn" is by that trainer; ours goes without a name
        record, entry = newest[name].record, newest[name]
        title = _CORPORA.get(corpus, corpus)
        test = f", `{CORPORA[corpus].test}`" if corpus in CORPORA and CORPORA[corpus].test != "test" else ""
        threads = re.search(r"--threads (\d+)", record["train_command"])
        cores = f" on {threads[1]} core{'s' * (threads[1] != '1')}" if threads else ""
        signature = record["bleu_signature"].removeprefix("BLEU|")
        bleu, lower = f"{record['bleu']:.2f}", f"{record.get('bleu_lowercase', record['bleu']):.2f}"
        yield Claim(
            f"{title}, {record['updates']:,} updates in {record['training_minutes']:.1f} minutes{cores}"
            f"{f', with a plain {peer} trainer' if peer else ''}{test}",
            f"{bleu} cased sacreBLEU (`{signature}`){f', {lower} lower-cased' if lower != bleu else ''}",
            (entry,),
        )
        yield Claim(
            f"{title}{f' by a plain {peer} trainer' if peer else ''}: training speed, {record['padding']:.1%} padding",
            f"{record['target_tokens_per_second']:,} target tokens/s",
            (entry,),
        )


def _groups(rows: pd.DataFrame) -> Iterator[Claim]:
    for (group, _, dtype), part in rows[rows.usable].groupby(["group", "machine", "dtype"], sort=False):
        both = duels(part).dropna(subset="ratio")
        if group == "decoding":
            both = both[both.case == "paper-base"]
        quiet = both[~both.noisy]
        if group not in _SUMMED_UP or quiet.empty:
            continue
        ratio, left_out = quiet.ratio, len(both) - len(quiet)
        yield Claim(
            f"{len(quiet)} shapes of {_SUMMED_UP[group]}, {short_dtype(dtype)}, our fastest way"
            f"{_named(quiet.provider)} against the fastest other{_named(quiet.provider_other)}",
            f"{np.exp(np.log(ratio).mean()):.2f}x as fast (geometric mean; {ratio.min():.2f}x to {ratio.max():.2f}x), "
            f"slower in {(ratio < 1).sum()}; times {plus_minus(pd.concat([quiet.spread, quiet.spread_other]))}"
            f"{f'; {left_out} noisy shapes left out' if left_out else ''}",
            tuple(quiet[["entry", "entry_other"]].to_numpy().flatten()),
        )


def _named(providers: pd.Series) -> str:
    """The provider in brackets, where one is the fastest everywhere: a graph beside eager steps is to be seen."""
    return f" ({providers.iloc[0]})" if providers.nunique() == 1 and providers.iloc[0] != OURS else ""


def _forecasts(entries: Sequence[Entry]) -> Iterator[Claim]:
    for entry in [entry for entry in entries if entry.kind == "time_series"][-1:]:
        errors = {name: error["mae"] for name, error in entry.record["errors"].items() if "mae" in error}
        (_, ours), *others = errors.items()
        beside = ", ".join(f"{name} {mae:.3f}" for name, mae in others)
        yield Claim("ETTh1 oil temperature, next day, held out", f"{ours:.3f} MAE ({beside})", (entry,))
