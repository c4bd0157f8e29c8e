"""One command wherever a GPU is at hand: tests, sanitizer, then a few minutes of timings, kept in benchmarks/results.

    python -m benchmarks.gpu_check [--minutes 5] [--only attention] [--timings]

Exit status 0 when the tests passed and the timings ran. Times are those of the device at hand and of nothing else: each
line names device, driver, versions and commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernel_cases, machine
from benchmarks.kernel_cases import Case
from fasttfm.timing import Clock, DeviceClock, Timing, measure

RESULTS = Path(__file__).with_name("results")
_SANITIZED = "tests/gpu/test_kernels.py"


def run_tests() -> int:
    """The tests that need a GPU."""
    return subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-q"], cwd=machine.ROOT, check=False).returncode


def run_sanitizer() -> int:
    """compute-sanitizer's memory and race checks over the kernel tests; 0 where the tool is not installed."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed (it comes with the CUDA toolkit): memory and race checks left out")
        return 0
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", "--target-processes", "all"]
        command += [sys.executable, "-m", "pytest", "-q", "-x", "-k", "sanitized", _SANITIZED]
        if status := subprocess.run(command, cwd=machine.ROOT, check=False).returncode:
            print(f"compute-sanitizer {check} found errors (or the tests failed under it)")
            return status
    return 0


def rows(case: Case, timings: dict[str, Timing | str]) -> Iterable[dict[str, Any]]:
    """One record a provider: what ran, how long it took, and the rates that follow from what it must cost."""
    for provider, timing in timings.items():
        record = {**case.record(), "provider": provider}
        if isinstance(timing, str):
            yield {**record, "refused": timing}
            continue
        seconds = timing.median_us * 1e-6
        yield {
            **record,
            **{name: round(v, 2) if isinstance(v, float) else v for name, v in dataclasses.asdict(timing).items()},
            "needed_gb_per_s": round(case.cost.bytes / seconds / 1e9, 1),
            "needed_tflop_per_s": round(case.cost.flops / seconds / 1e12, 2),
        }


def run_timings(
    cases: Iterable[Case], clock: Clock, *, seconds_per_case: float, file: Path, where: dict[str, Any]
) -> None:
    """Appends a line for every case and provider to file, as soon as it is known."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        timings = measure(case.providers, clock, seconds=seconds_per_case)
        with file.open("a") as lines:
            for row in rows(case, timings):
                lines.write(json.dumps({**row, **where}) + "\n")
        print(_summary(case, timings), flush=True)


def _summary(case: Case, timings: dict[str, Timing | str]) -> str:
    known = sorted((t.median_us, name) for name, t in timings.items() if isinstance(t, Timing))
    shape = " ".join(f"{key}={value}" for key, value in case.record().items() if key != "benchmark")
    return f"{case.name} {shape}\n    " + "  ".join(f"{name} {us:.1f} us" for us, name in known)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description="Tests, sanitizer and timings on a GPU."
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="for the timings; default: %(default)s")
    parser.add_argument("--only", default="", help="time only benchmarks whose name begins so")
    parser.add_argument("--timings", action="store_true", help="leave out tests and sanitizer")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "gpu-check: there is no CUDA or ROCm device that torch can use here. Run it on a machine with one (and a "
            "torch build for it); everything that needs none is checked by `make test`.",
            file=sys.stderr,
        )
        return 2
    if not args.timings and (status := run_tests() or run_sanitizer()):
        return status
    where = machine.describe()
    product = re.sub(r"[^A-Za-z0-9]+", "-", where["device"])
    file = RESULTS / f"kernels-{product}-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}.jsonl"
    makers = [make for name, make in kernel_cases.all_cases() if name.startswith(args.only)]
    if not makers:
        parser.error(f"no benchmark begins with {args.only}")
    run_timings(
        (make() for make in makers),
        DeviceClock(torch.device("cuda", torch.cuda.current_device())),
        seconds_per_case=60 * args.minutes / len(makers),
        file=file,
        where=where,
    )
    print(f"kept in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
