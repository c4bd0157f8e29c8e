"""Builds the record of a provider from the harness's measurements."""

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.measure.case import Case, Clock, Entry, Setting, Work
from benchmarks.measure.machine import disturbed, noisy, spread
from benchmarks.measure.records import Record, rounded
from fasttfm.kernels.proof.costs import Cost, Machine


def record(
    case: Case,
    work: Work,
    name: str,
    entry: Entry,
    setting: Setting,
    clock: Clock,
    ceilings: Machine | None,
    machine: Mapping[str, Any] | None,
    load: dict[str, float | None] | None = None,
) -> Record:
    """Record of one provider; load: of the machine during the timed runs."""
    timed = entry.status == "timed"
    row: Record = {
        "schema": 1,
        "group": case.group,
        "case": case.name,
        "shape": case.shape,
        "dtype": case.dtype,
        "pass": case.passes,
        "provider": name,
        "status": entry.status,
        "reason": entry.reason,
        "clock": clock.name,
        "time_us": None,
        "throughput": None,
        "tflop_per_s": None,
        "gb_per_s": None,
        "roofline": None,
        "peak_bytes": entry.peak_bytes if timed else None,
        "launches": entry.launches if timed else None,
        "compile_s": rounded(entry.compile_s) if timed else None,
        "error": None,
        "seed": setting.seed,
        "level": setting.level,
        "threads": setting.threads,
        "machine": dict(machine or {}),
    }
    if entry.error is not None and entry.allowed is not None:
        row["error"] = {"value": rounded(entry.error), "allowed": rounded(entry.allowed), "measure": work.measure}
    if timed and entry.times:
        p20, p50, p80 = np.quantile(entry.times, (0.2, 0.5, 0.8)).tolist()
        row["time_us"] = {"p20": rounded(p20), "p50": rounded(p50), "p80": rounded(p80), "runs": len(entry.times)}
        row |= {"load": load, "spread": rounded(spread(row["time_us"]))} if load else {}
        row["noisy"] = setting.level != "smoke" and (disturbed(load) or noisy(row))
        fewer_bits = " int8" in name and case.dtype != "int8"  # the ceilings are for the case's dtype
        row |= _rates(case.cost, p50, None if fewer_bits else ceilings)
        if work.unit is not None and entry.units:
            # over the median time: inputs are the same for all providers, so throughputs compare as times do
            row["throughput"] = {"value": rounded(statistics.mean(entry.units) / p50 * 1e6), "unit": work.unit}
        if entry.details is not None:
            row["details"] = entry.details
    return row


def _rates(cost: Cost | None, p50: float, ceilings: Machine | None) -> Record:
    """TFLOP/s, GB/s and the share of the roofline."""
    if cost is None:
        return {}
    result: Record = {
        "tflop_per_s": rounded(cost.flops / p50 / 1e6) if cost.flops else None,
        "gb_per_s": rounded(cost.bytes / p50 / 1e3) if cost.bytes else None,
    }
    if ceilings is not None:
        floor = 1e6 * cost.seconds(ceilings)
        result["roofline"] = {
            "floor_us": rounded(floor),
            "share": rounded(floor / p50),
            "ceilings": {"gb_per_s": rounded(ceilings.bandwidth / 1e9), "tflop_per_s": rounded(ceilings.flops / 1e12)},
        }
    return result
