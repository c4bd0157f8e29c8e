"""Compiles every kernel and tile for every chip, without a device, and holds the outcome against recorded budgets.

    python -m fasttfm.kernels.proof.matrix --report                            every kernel on every chip
    python -m fasttfm.kernels.proof.matrix --cases --chips sm_60,sm_80 --kernels attention
    python -m fasttfm.kernels.proof.matrix --heaviest                          two cases a kernel and chip
    python -m fasttfm.kernels.proof.matrix --update-budgets                    record what came out

What is compiled is what cases/ lists: compile_case.py says how, residual_add.py shows it. The first run takes a
second a case or so; Triton's cache on disk (TRITON_CACHE_DIR, else ~/.triton) makes the next one quick.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import pkgutil
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import wait
from pathlib import Path

from fasttfm.kernels.chip import CHIPS, Chip, named
from fasttfm.kernels.proof import budgets
from fasttfm.kernels.proof import cases as listed
from fasttfm.kernels.proof import report as compile_report
from fasttfm.kernels.proof.assembler import toolchain
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import Resources, counted
from ptx_check.ledger.counted import Counted

SAMPLED: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        named("sm_103", 227 << 10, 160),  # B300
        named("sm_110", 227 << 10, 20),  # Jetson Thor
        named("sm_121", 99 << 10, 48),  # DGX Spark
        named("gfx1100", 64 << 10, 96),  # RX 7900 XTX
        named("gfx1201", 64 << 10, 64),  # RX 9070 XT
    )
}
"""Chips of which a sample is compiled, one case of every kernel file: they take the tiles of their relatives
(tiles/table.py), so that all cases would say little more."""

KNOWN = CHIPS | SAMPLED


@dataclass(frozen=True, slots=True)
class Task:
    """A case by its place, because kernels do not travel between processes."""

    family: str
    chip: str
    index: int


@dataclass(frozen=True, slots=True)
class Outcome:
    resources: Resources | None
    error: str = ""
    """Why it did not compile, when resources is None."""
    counted: Counted | None = None
    """The ledger's counts of the machine code."""


@functools.cache
def families() -> dict[str, Callable[[Chip], Iterable[CompileCase]]]:
    """Kernel file, as attention.forward, -> the compile_cases of the file of its name in cases/."""
    root = f"{listed.__name__}."
    names = [module.name for module in pkgutil.walk_packages(listed.__path__, root) if not module.ispkg]
    return {name.removeprefix(root): importlib.import_module(name).compile_cases for name in names}


def _listed(cases: Callable[[Chip], Iterable[CompileCase]], chip: Chip) -> Iterable[CompileCase]:
    """All cases of a kernel file; for a sampled chip the first in bfloat16, if there is one: some files are for one
    chip alone."""
    if chip.name not in SAMPLED:
        return cases(chip)
    return [case for case in cases(chip) if case.dtype == "bf16"][:1]


def enumerate_cases(chips: Iterable[Chip], wanted: Sequence[str] = ()) -> Iterator[tuple[Task, CompileCase]]:
    """All cases of the kernel files whose name starts with one of `wanted` (all files without it).

    Raises ValueError when two cases of a chip have one name.
    """
    for chip in chips:
        seen = set()
        for family, cases in families().items():
            if wanted and not family.startswith(tuple(wanted)):
                continue
            for index, case in enumerate(_listed(cases, chip)):
                key = budgets.key(chip, case)
                if key in seen:
                    file = family.replace(".", "/")
                    raise ValueError(f"kernels/{file}.py lists {case.name} {case.dtype} twice for {chip.name}")
                seen.add(key)
                yield Task(family, chip.name, index), case


def heaviest(cases: Mapping[Task, CompileCase]) -> list[Task]:
    """The first case of every kernel on every chip, the recorded one with the most spills, then registers, and each
    that has no budget: tiles that another Triton alone takes."""
    _, recorded = budgets.read()
    unknown = Resources(0, 0, 0, 0)
    chosen: dict[tuple[str, str, str], list[tuple[int, int, int, Task]]] = {}
    for task, case in cases.items():
        measured = recorded.get(budgets.key(KNOWN[task.chip], case), unknown)
        kernel_key = (task.family, task.chip, case.kernel.__name__)
        chosen.setdefault(kernel_key, []).append((measured.spill, measured.registers, -task.index, task))
    heavy = [task for of_one in chosen.values() for *_, task in (of_one[0], max(of_one))]
    return list(dict.fromkeys([*heavy, *unrecorded(cases)]))


def unrecorded(cases: Mapping[Task, CompileCase]) -> list[Task]:
    """The cases that budgets.csv does not have, or has without a bound."""
    _, recorded = budgets.read()
    known = {key for key, needs in recorded.items() if needs.bound}
    return [task for task, case in cases.items() if budgets.key(KNOWN[task.chip], case) not in known]


def _start_worker() -> None:
    """Has a worker end when the process that started it has, however that ended: nobody waits for the outcome then."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    threading.Thread(target=lambda: (wait([starter.sentinel]), os._exit(1)), daemon=True).start()


@functools.cache
def _cases(family: str, chip: str) -> list[CompileCase]:
    return list(_listed(families()[family], KNOWN[chip]))


def _run(task: Task) -> Outcome:
    try:
        found = counted.of_case(KNOWN[task.chip], _cases(task.family, task.chip)[task.index])
        return Outcome(found.resources, counted=found)
    except Exception as error:  # whatever the compiler raises is the outcome
        reason = "; ".join(line for line in str(error).splitlines() if line.strip())
        return Outcome(None, f"{type(error).__name__}: {reason[:400]}")


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Processes in which Triton compiles: whoever imports it for its interpreter cannot compile with it any more."""
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _start_worker
        ) as pool:
            yield pool
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def compile_tasks(
    tasks: Sequence[Task], workers: int | None = None, progress: Callable[[int, int], None] | None = None
) -> dict[Task, Outcome]:
    """Compiles in parallel processes; a case that crashes the compiler is an error like another."""
    outcomes: dict[Task, Outcome] = {}
    workers = max(1, min(workers or os.cpu_count() or 1, len(tasks)))
    remaining = list(tasks)
    while remaining:
        with _pool(workers) as pool:
            running = {pool.submit(_run, task): task for task in remaining}
            try:
                for future in concurrent.futures.as_completed(running):
                    outcomes[running[future]] = future.result()
                    if progress is not None:
                        progress(len(outcomes), len(tasks))
            except BrokenProcessPool:
                pass
            except BaseException:  # Ctrl-C: what waits need not be compiled first
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        remaining = [task for task in tasks if task not in outcomes]
        if remaining:
            # One of the first few killed its process and took the pool along: find out which, one process each.
            for task in remaining[: workers + 1]:
                with _pool(1) as alone:
                    try:
                        outcomes[task] = alone.submit(_run, task).result()
                    except BrokenProcessPool:
                        outcomes[task] = Outcome(None, "the compiler crashed")
            remaining = remaining[workers + 1 :]
    return outcomes


def complaints(chip: Chip, case: CompileCase, outcome: Outcome, budget: Resources | None, *, exact: bool) -> list[str]:
    """Everything wrong with an outcome. exact: hold it against its budget too, as only the recording Triton and
    assemblers may."""
    if outcome.resources is None:
        return [f"does not compile: {outcome.error}"]
    loops = outcome.counted.count.loops if outcome.counted is not None else ()
    broken = budgets.broken_rules(chip, case, outcome.resources, loops)
    if exact:
        broken += budgets.regressions(outcome.resources, budget)
    return broken


def recorded_table() -> str:
    """The report of what budgets.csv records of the cases that the kernel files list."""
    made_by, recorded = budgets.read()
    keyed = [(KNOWN[task.chip], case) for task, case in enumerate_cases(CHIPS.values())]
    budgeted = [(chip, case, recorded.get(budgets.key(chip, case))) for chip, case in keyed]
    rows = [(chip, case, Outcome(known)) for chip, case, known in budgeted if known is not None]
    return f"{len(rows):,} of {len(keyed):,} cases, {made_by}\n\n{compile_report.by_kernel(rows)}"


def _update(cases: Mapping[Task, CompileCase], outcomes: Mapping[Task, Outcome]) -> None:
    """Records what compiled, drops what no kernel file lists any more and keeps the rest."""
    _, recorded = budgets.read()
    current = {budgets.key(KNOWN[task.chip], case) for task, case in enumerate_cases(KNOWN.values())}
    recorded = {key: value for key, value in recorded.items() if key in current}
    for task, case in cases.items():
        if (resources := outcomes[task].resources) is not None:
            recorded[budgets.key(KNOWN[task.chip], case)] = resources
    budgets.write(toolchain(), recorded)
    compile_report.write_page(recorded_table())


def write_record(file: Path, cases: Mapping[Task, CompileCase], outcomes: Mapping[Task, Outcome]) -> None:
    """Appends a line of JSON: what compiled how many cases on which chips, each that broke a rule, and the bound that
    the ledger counts of each beside that of its budget, None for a tile that the budgets do not have."""
    _, recorded = budgets.read()
    named = {task: {"chip": task.chip, "case": case.name, "dtype": case.dtype} for task, case in cases.items()}
    broken = [
        {**named[task], "complaint": complaint}
        for task, case in cases.items()
        for complaint in complaints(KNOWN[task.chip], case, outcomes[task], None, exact=False)
    ]
    bounds = [
        {**named[task], "bound": known.bound, "budget": budget and budget.bound}
        for task, case in cases.items()
        if (known := outcomes[task].resources) is not None
        for budget in [recorded.get(budgets.key(KNOWN[task.chip], case))]
    ]
    record = {
        "benchmark": "compile_matrix",
        **origin("fasttfm.kernels.proof.matrix"),
        "toolchain": toolchain(),
        "chips": list(dict.fromkeys(task.chip for task in cases)),
        "cases": len(cases),
        "compiled": sum(outcome.resources is not None for outcome in outcomes.values()),
        "broken": broken,
        "bounds": bounds,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def origin(module: str) -> dict[str, str | None]:
    """Return what a record says of where it is from: the command of this module, the date, the commit, the Triton."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "triton": metadata.version("triton"),
    }


def _commit() -> str | None:
    """The commit of the checkout; None where this is installed without one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def progress_line() -> Callable[[int, int], None]:
    """Cases done and the time left: one line that is written over on a terminal, elsewhere a line a hundred."""
    began = time.monotonic()

    def tell(done: int, total: int) -> None:
        left = (time.monotonic() - began) * (total - done) / done
        line = f"{done}/{total} compiled, about {left / 60:.0f} min left"
        if sys.stderr.isatty():
            print(f"\r{line}", end=" " if done < total else "\n", file=sys.stderr, flush=True)
        elif done % 100 == 0 or done == total:
            print(line, file=sys.stderr, flush=True)

    return tell


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttfm.kernels.proof.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--report", action="store_true", help="print the worst of every kernel on every chip")
    parser.add_argument("--cases", action="store_true", help="print every case")
    parser.add_argument("--chips", default=",".join(KNOWN), help="comma-separated (default: %(default)s)")
    parser.add_argument("--kernels", default="", help="comma-separated beginnings of kernel file names (default: all)")
    parser.add_argument("--heaviest", action="store_true", help="only the first and the heaviest case of every kernel")
    parser.add_argument("--unrecorded", action="store_true", help="only cases that have no budget yet")
    parser.add_argument(
        "--update-budgets",
        action="store_true",
        help=f"record the outcome in {budgets.FILE.name} and in the table of {compile_report.PAGE.name}",
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="append what broke a rule as a line of JSON")
    parser.add_argument("--workers", type=int, help="parallel processes (default: one a core)")
    parser.add_argument("--quiet", action="store_true", help="no progress; the outcome and errors stay")
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON document on standard output")
    args = parser.parse_args(argv)
    unknown = [name for name in args.chips.split(",") if name not in KNOWN]
    if unknown:
        parser.error(f"unknown chip {', '.join(unknown)}: choose from {', '.join(KNOWN)}")
    wanted = [name for name in args.kernels.split(",") if name]
    cases = dict(enumerate_cases([KNOWN[name] for name in args.chips.split(",")], wanted))
    if not cases:
        parser.error(f"no kernel file begins with {args.kernels}: there are {', '.join(families())}")
    if args.heaviest:
        cases = {task: cases[task] for task in heaviest(cases)}
    if args.unrecorded:
        cases = {task: cases[task] for task in unrecorded(cases)}

    outcomes = compile_tasks(list(cases), args.workers, None if args.quiet else progress_line())
    if args.update_budgets:
        _update(cases, outcomes)
    if args.record:
        write_record(args.record, cases, outcomes)
    made_by, recorded = budgets.read()
    rows = [(KNOWN[task.chip], case, outcomes[task]) for task, case in cases.items()]
    if args.report and not args.json:
        print(compile_report.by_kernel(row for row in rows if row[0].name in CHIPS))
    if args.cases and not args.json:
        print(compile_report.by_case(rows))
    failures = [
        f"{task.chip} {case.name} {case.dtype}: {complaint}"
        for task, case in cases.items()
        for complaint in complaints(
            KNOWN[task.chip],
            case,
            outcomes[task],
            recorded.get(budgets.key(KNOWN[task.chip], case)),
            exact=made_by == toolchain(),
        )
    ]
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{len(cases)} cases on {len(args.chips.split(','))} chips, {len(failures)} complaints", file=sys.stderr)
    if args.json:
        compiled = sum(outcome.resources is not None for outcome in outcomes.values())
        print(json.dumps({"cases": len(cases), "compiled": compiled, "complaints": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; what was compiled stays in Triton's cache")
