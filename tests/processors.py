"""Runs the numeric tests as on older processors, by disabling instruction sets of this one.

    python -m tests.processors                      all processors that this one can emulate
    python -m tests.processors --processor avx2     one of them

PyTorch, oneDNN, MKL and numba select code by instruction set, which environment variables can restrict. The tests
include guaranteed bits (of a search in any batch, of a resumed training). benchmarks/results/processors.jsonl gets a
record for each processor, which replaces the previous one of this machine's processor: cases, failures, the int8
backend and the slowest case. The exit status is 1 if a case failed or took more than LIMIT seconds.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command
from benchmarks.measure import machine, records
from fasttfm.errors import UserError
from fasttfm.system.machine import cpuinfo
from fasttfm.system.parsing import parse_yaml
from tests.pytest_runs import counts, name_of, run_tests

LIMIT = 60.0
"""Most seconds of a case."""
TESTS = (
    *("cpu", "functional", "nn", "models", "search", "store"),
    *(f"training/test_{name}.py" for name in ("updates", "trainer", "interruption", "divergence")),
)


@dataclass(frozen=True)
class Processor:
    """A processor to emulate."""

    name: str
    needs: tuple[str, ...]
    """Flags of /proc/cpuinfo that it requires."""
    variables: Mapping[str, str]
    """Environment variables that disable all other instruction sets."""


_TABLE = parse_yaml((Path(__file__).parent / "processors.yaml").read_bytes())
PROCESSORS = [Processor(name, tuple(each["needs"]), each["variables"]) for name, each in _TABLE.items()]


def instructions() -> frozenset[str]:
    """The processor's flags by Linux's names; empty on other systems."""
    return frozenset(cpuinfo("flags").split())


def available(flags: frozenset[str]) -> list[Processor]:
    """The processors that one with these flags can emulate. Raises UserError if there are none."""
    found = [processor for processor in PROCESSORS if flags.issuperset(processor.needs)]
    if not found:
        raise UserError("AVX2 was not found in /proc/cpuinfo: run this on Linux, on an x86 processor with AVX2")
    return found


def measure(processor: Processor, workers: int) -> records.Record:
    """Run TESTS as on a processor; returns the record."""
    began = time.perf_counter()
    paths = [str(Path("tests") / test) for test in TESTS]
    with tempfile.TemporaryDirectory() as folder:
        # Inductor caches loops by the vector width at generation, but compiles them for the current processor:
        # loops generated for AVX-512, 16 wide, would compute every other 8 elements with AVX2.
        which = {"FASTTFM_TESTS": "all", "TORCHINDUCTOR_CACHE_DIR": folder}
        cases = run_tests(paths, workers, {**processor.variables, **which})
    slowest = max(cases, key=lambda case: float(case.get("time", 0.0)))
    return {
        "stands_for": processor.name,
        "variables": dict(processor.variables),
        "int8": _int8_route(processor),
        **counts(cases),
        "slowest": {"case": name_of(slowest), "seconds": round(float(slowest.get("time", 0.0)), 1)},
        "seconds": round(time.perf_counter() - began, 1),
        "workers": workers,
    }


def _int8_route(processor: Processor) -> str:
    words = [sys.executable, "-c", "from fasttfm.cpu import int8; print(int8.route() or 'none, float32')"]
    environment = {**os.environ, **processor.variables}
    return subprocess.check_output(words, cwd=machine.ROOT, env=environment, text=True).strip()


def sentence(record: records.Record) -> str:
    """One line about a record."""
    slowest = record["slowest"]
    return (
        f"{record['stands_for']}: {record['passed']:,} of {record['cases']:,} cases pass, {record['seconds']:,.0f} s, "
        f"the slowest in {slowest['seconds']:.0f} s; int8: {record['int8']}"
    )


def is_good(record: records.Record) -> bool:
    """Return whether every case passed within LIMIT."""
    return not record["failed"] and record["slowest"]["seconds"] <= LIMIT


def key(record: records.Record) -> tuple[str, str]:
    """The key of a record: a new one replaces that of the same processor on the same machine."""
    return record["machine"]["processor"], record["stands_for"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.processors", __doc__)
    names = [processor.name for processor in PROCESSORS]
    parser.add_argument(
        "--processor", action="append", choices=names, help="repeat for several (default: all available)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    args = parser.parse_args(argv)
    found = available(instructions())
    chosen = [processor for processor in found if args.processor is None or processor.name in args.processor]
    if missing := sorted({*(args.processor or ())} - {processor.name for processor in chosen}):
        raise UserError(f"--processor {missing[0]}: this machine's processor lacks its instruction sets")
    good = True
    for processor in chosen:
        record = command.keep(args.results, "processors", key=key, **measure(processor, args.workers))
        print(sentence(record), flush=True)
        good = good and is_good(record)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(command.run(main))
