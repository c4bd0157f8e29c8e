"""The numeric tests on other processors: this machine's, without the instructions that older ones lack.

    python -m tests.processors                      every processor that this machine can stand for
    python -m tests.processors --processor avx2     one of them

PyTorch, oneDNN, MKL and numba choose their code by the processor; environment variables forbid them instructions that
it has. `make processors` runs the tests so; promised bits (a search's in every batch, a stopped training's) are among
them. A line for each processor goes into benchmarks/results/processors.jsonl, in place of the one that this
machine's processor had there: cases, those that failed, the routes of int8, and the slowest case. Ends with status 1
where a case failed or took more than LIMIT seconds.
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
"""Seconds that a case may take."""
TESTS = (
    *("cpu", "functional", "nn", "models", "search", "store"),
    *(f"training/test_{name}.py" for name in ("updates", "trainer", "interruption", "divergence")),
)


@dataclass(frozen=True)
class Processor:
    """Instruction sets of a processor, and how one that has more is kept from using them."""

    name: str
    needs: tuple[str, ...]
    """Of the flags of /proc/cpuinfo."""
    variables: Mapping[str, str]


_TABLE = parse_yaml((Path(__file__).parent / "processors.yaml").read_bytes())
PROCESSORS = [Processor(name, tuple(each["needs"]), each["variables"]) for name, each in _TABLE.items()]


def instructions() -> frozenset[str]:
    """The flags of the processor, as Linux names them; none elsewhere."""
    return frozenset(cpuinfo("flags").split())


def available(flags: frozenset[str]) -> list[Processor]:
    """The processors that one with these flags can stand for. Raises UserError where there is none."""
    found = [processor for processor in PROCESSORS if flags.issuperset(processor.needs)]
    if not found:
        raise UserError("this processor has no AVX2, or Linux does not tell: run this on an x86 processor that has it")
    return found


def measure(processor: Processor, workers: int) -> records.Record:
    """Return the record of TESTS on a processor."""
    began = time.perf_counter()
    paths = [str(Path("tests") / test) for test in TESTS]
    with tempfile.TemporaryDirectory() as folder:
        # Inductor keeps loops with the width of their vectors, and compiles them again for whatever processor asks:
        # loops of 16 numbers, made for AVX-512, then compute every other 8 where vectors have 8.
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
    """A record in a line."""
    slowest = record["slowest"]
    return (
        f"{record['stands_for']}: {record['passed']:,} of {record['cases']:,} cases pass, {record['seconds']:,.0f} s, "
        f"the slowest in {slowest['seconds']:.0f} s; int8: {record['int8']}"
    )


def is_good(record: records.Record) -> bool:
    """Return whether every case passed in time."""
    return not record["failed"] and record["slowest"]["seconds"] <= LIMIT


def key(record: records.Record) -> tuple[str, str]:
    """A new record takes the place of the one of the same processor on the same machine's."""
    return record["machine"]["processor"], record["stands_for"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.processors", __doc__)
    names = [processor.name for processor in PROCESSORS]
    parser.add_argument("--processor", action="append", choices=names, help="one, or several (default: all there are)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    args = parser.parse_args(argv)
    found = available(instructions())
    chosen = [processor for processor in found if args.processor is None or processor.name in args.processor]
    if missing := sorted({*(args.processor or ())} - {processor.name for processor in chosen}):
        raise UserError(f"--processor {missing[0]}: this machine's processor lacks what it needs")
    good = True
    for processor in chosen:
        record = command.keep(args.results, "processors", key=key, **measure(processor, args.workers))
        print(sentence(record), flush=True)
        good = good and is_good(record)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(command.run(main))
