"""The suite's records as a pandas table, and for each case our fastest provider beside the fastest other."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from benchmarks.measure.machine import is_cpu, machine_name, noisy, spread
from benchmarks.measure.providers import CUDA_GRAPH, OURS
from benchmarks.measure.records import Entry
from benchmarks.measure.text_table import shape_text

CASE = ["machine", "group", "case", "text", "dtype", "pass"]
"""Columns that identify a case; text: its shape."""
TITLES = {
    "kernels": "Kernels",
    "blocks": "Layers",
    "training_step": "Training step",
    "decoding": "Decoding",
    "padding": "Padding and packing",
}
_GRAPHED = "CUDA graph"
"""Suffix of providers whose launches are captured."""
_KINDS = {
    **dict.fromkeys(("ours", "cpu", "usable", "noisy"), bool),
    **dict.fromkeys(("p20", "p50", "p80", "runs", "spread", "share", "mib"), float),
    **dict.fromkeys(("entry", "machine", "time", "text"), object),
}
"""Columns beside _FIELDS. usable: timed, and not of level smoke; mib: peak memory."""
_FIELDS = ("group", "case", "shape", "dtype", "pass", "provider", "status", "reason", "level", "threads")


def suite(entries: Sequence[Entry]) -> pd.DataFrame:
    """A table of all records of the suite: their fields, and their Entry."""
    lines = []
    for entry in entries:
        if entry.kind != "benchmark":
            continue
        record = entry.record
        times = record["time_us"] or {}
        lines.append(
            {
                **{name: record[name] for name in _FIELDS},
                **times,
                "entry": entry,
                "machine": machine_name(entry.machine),
                "cpu": is_cpu(entry.machine),
                "time": entry.machine["time"],
                "text": shape_text(record["shape"]),
                "ours": record["provider"].startswith(OURS),
                "usable": record["status"] == "timed" and record["level"] != "smoke",
                "noisy": noisy(record),
                "spread": spread(times) if times else np.nan,
                "share": (record["roofline"] or {}).get("share"),
                "mib": np.nan if without_pool(entry) else (record["peak_bytes"] or np.nan) / 2**20,
            }
        )
    return pd.DataFrame(lines, columns=[*_FIELDS, *_KINDS]).astype(_KINDS)


def without_pool(entry: Entry) -> bool:
    """Return whether memory was measured without the CUDA graph's pool, as before November 28, 2026.

    Only these records of a graph have a number of launches.
    """
    return entry.record["provider"] == CUDA_GRAPH and entry.record["launches"] is not None


def duels(rows: pd.DataFrame) -> pd.DataFrame:
    """Cases in which ours was timed, in order: columns of our fastest provider, and of the fastest other with _other.

    Our CUDA graph only counts if another provider of the case has one. ratio: speed of ours over the other's. noisy:
    whether any row of the case is, because dropping only that row would change which provider is the fastest.
    """
    timed = rows[rows.status == "timed"]
    graphed = timed.provider.str.endswith(_GRAPHED)
    cases = timed.set_index(CASE).index
    unequal = cases.isin(cases[~timed.ours]) & ~cases.isin(cases[graphed & ~timed.ours])
    timed = timed[~(graphed & timed.ours & unequal)]

    def fastest(some: pd.DataFrame) -> pd.DataFrame:
        return some.loc[some.groupby(CASE, sort=False).p50.idxmin()].set_index(CASE)

    result = fastest(timed[timed.ours]).join(fastest(timed[~timed.ours]).add_suffix("_other"))
    result["noisy"] = timed.groupby(CASE).noisy.any()
    result["ratio"] = result.p50_other / result.p50
    return result.reset_index()


def quiet(rows: pd.DataFrame) -> pd.DataFrame:
    """The duels with both sides timed, and no row noisy or of level smoke."""
    both = duels(rows[rows.usable]).dropna(subset="ratio")
    return both[~both.noisy]


def mean(ratios: pd.Series) -> float:
    """Geometric mean."""
    return float(np.exp(np.log(ratios).mean()))
