"""Compiles every kernel and tile for every chip, without a device, and compares the results with recorded budgets.

    python -m fasttfm.kernels.proof.matrix --report                            every kernel on every chip
    python -m fasttfm.kernels.proof.matrix --heaviest                          two cases per kernel and chip
    python -m fasttfm.kernels.proof.matrix --update-budgets                    record the results

cases/ lists the cases, as compile_case.py describes. The first run takes about a second per case; later runs use
Triton's cache on disk (TRITON_CACHE_DIR, else ~/.triton).
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
"""Chips with only one case per kernel file: they use the tiles of related chips (tiles/table.py), so more cases would
show little."""

KNOWN = CHIPS | SAMPLED


@dataclass(frozen=True, slots=True)
class Task:
    """A case by its index, because kernels cannot be pickled."""

    family: str
    chip: str
    index: int


@dataclass(frozen=True, slots=True)
class Outcome:
    resources: Resources | None
    error: str = ""
    """The compiler's error, if resources is None."""
    counted: Counted | None = None
    """The counts of the machine code, by the ledger."""


@functools.cache
def families() -> dict[str, Callable[[Chip], Iterable[CompileCase]]]:
    """Kernel file, such as attention.forward -> compile_cases() of the file of the same name in cases/."""
    root = f"{listed.__name__}."
    names = [module.name for module in pkgutil.walk_packages(listed.__path__, root) if not module.ispkg]
    return {name.removeprefix(root): importlib.import_module(name).compile_cases for name in names}


def _listed(cases: Callable[[Chip], Iterable[CompileCase]], chip: Chip) -> Iterable[CompileCase]:
    """All cases of a kernel file; for a sampled chip the first one in bfloat16, if any."""
    if chip.name not in SAMPLED:
        return cases(chip)
    return [case for case in cases(chip) if case.dtype == "bf16"][:1]


def enumerate_cases(chips: Iterable[Chip], prefixes: Sequence[str] = ()) -> Iterator[tuple[Task, CompileCase]]:
    """Yields all cases of the kernel files whose name starts with one of the prefixes, by default of all files.

    Raises ValueError if two cases of a chip have the same name.
    """
    for chip in chips:
        seen = set()
        for family, cases in families().items():
            if prefixes and not family.startswith(tuple(prefixes)):
                continue
            for index, case in enumerate(_listed(cases, chip)):
                key = budgets.key(chip, case)
                if key in seen:
                    file = family.replace(".", "/")
                    raise ValueError(f"kernels/{file}.py lists {case.name} {case.dtype} twice for {chip.name}")
                seen.add(key)
                yield Task(family, chip.name, index), case


def heaviest(cases: Mapping[Task, CompileCase]) -> list[Task]:
    """Per kernel and chip, the first case and the one with the most recorded spills, then registers; also all cases
    without a budget or bound, whose tiles are used only with another version of Triton."""
    _, recorded = budgets.read()
    by_kernel: dict[tuple[str, str, str], list[tuple[int, int, int, Task]]] = {}
    for task, case in cases.items():
        measured = recorded.get(budgets.key(KNOWN[task.chip], case), Resources(0, 0, 0, 0))
        kernel = (task.family, task.chip, case.kernel.__name__)
        by_kernel.setdefault(kernel, []).append((measured.spill, measured.registers, -task.index, task))
    heavy = [task for weighed in by_kernel.values() for *_, task in (weighed[0], max(weighed))]
    return list(dict.fromkeys([*heavy, *unrecorded(cases)]))


def unrecorded(cases: Mapping[Task, CompileCase]) -> list[Task]:
    """The cases without a budget or without a bound in it."""
    _, recorded = budgets.read()
    bounded = {key for key, resources in recorded.items() if resources.bound}
    return [task for task, case in cases.items() if budgets.key(KNOWN[task.chip], case) not in bounded]


def _start_worker() -> None:
    """Makes a worker exit when its parent process ends in any way."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    threading.Thread(target=lambda: (wait([starter.sentinel]), os._exit(1)), daemon=True).start()


@functools.cache
def _cases(family: str, chip: str) -> list[CompileCase]:
    return list(_listed(families()[family], KNOWN[chip]))


def _run(task: Task) -> Outcome:
    try:
        result = counted.of_case(KNOWN[task.chip], _cases(task.family, task.chip)[task.index])
        return Outcome(result.resources, counted=result)
    except Exception as error:  # any exception of the compiler is an outcome
        reason = "; ".join(line for line in str(error).splitlines() if line.strip())
        return Outcome(None, f"{type(error).__name__}: {reason[:400]}")


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Worker processes with Triton's interpreter off, so that they can compile."""
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
    """Compiles in parallel processes; a compiler crash becomes the error of its case."""
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
            except BaseException:  # Ctrl-C: cancel the queue
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        remaining = [task for task in tasks if task not in outcomes]
        if remaining:
            # One of the first few crashed its process and broke the pool: rerun each in a process of its own.
            for task in remaining[: workers + 1]:
                with _pool(1) as alone:
                    try:
                        outcomes[task] = alone.submit(_run, task).result()
                    except BrokenProcessPool:
                        outcomes[task] = Outcome(None, "the compiler crashed")
            remaining = remaining[workers + 1 :]
    return outcomes


def complaints(chip: Chip, case: CompileCase, outcome: Outcome, budget: Resources | None, *, exact: bool) -> list[str]:
    """Errors, broken rules and regressions of an outcome. exact: compare with the budget, which is valid only for the
    Triton and assemblers that recorded it."""
    if outcome.resources is None:
        return [f"does not compile: {outcome.error}"]
    loops = outcome.counted.count.loops if outcome.counted is not None else ()
    broken = budgets.broken_rules(chip, case, outcome.resources, loops)
    if exact:
        broken += budgets.regressions(outcome.resources, budget)
    return broken


def all_complaints(cases: Mapping[Task, CompileCase], outcomes: Mapping[Task, Outcome]) -> list[str]:
    """The complaints() of all cases, one line each."""
    made_by, recorded = budgets.read()
    exact = made_by == toolchain()
    lines = []
    for task, case in cases.items():
        chip = KNOWN[task.chip]
        budget = recorded.get(budgets.key(chip, case))
        found = complaints(chip, case, outcomes[task], budget, exact=exact)
        lines += [f"{chip.name} {case.name} {case.dtype}: {complaint}" for complaint in found]
    return lines


def recorded_table() -> str:
    """The report of the recorded budgets of all listed cases."""
    made_by, recorded = budgets.read()
    listed_cases = [(KNOWN[task.chip], case) for task, case in enumerate_cases(CHIPS.values())]
    budgeted = [(chip, case, recorded.get(budgets.key(chip, case))) for chip, case in listed_cases]
    rows = [(chip, case, Outcome(budget)) for chip, case, budget in budgeted if budget is not None]
    return f"{len(rows):,} of {len(listed_cases):,} cases, {made_by}\n\n{compile_report.by_kernel(rows)}"


def _update(cases: Mapping[Task, CompileCase], outcomes: Mapping[Task, Outcome]) -> None:
    """Records the compiled cases, drops cases that are no longer listed and keeps the rest."""
    _, recorded = budgets.read()
    current = {budgets.key(KNOWN[task.chip], case) for task, case in enumerate_cases(KNOWN.values())}
    recorded = {key: value for key, value in recorded.items() if key in current}
    for task, case in cases.items():
        if (resources := outcomes[task].resources) is not None:
            recorded[budgets.key(KNOWN[task.chip], case)] = resources
    budgets.write(toolchain(), recorded)
    compile_report.write_page(recorded_table())


def write_record(file: Path, cases: Mapping[Task, CompileCase], outcomes: Mapping[Task, Outcome]) -> None:
    """Appends a JSON line: toolchain, chips, number of cases, broken rules, and the counted and budgeted bound of each
    case (None without a budget)."""
    _, recorded = budgets.read()
    broken, bounds = [], []
    for task, case in cases.items():
        names = {"chip": task.chip, "case": case.name, "dtype": case.dtype}
        for complaint in complaints(KNOWN[task.chip], case, outcomes[task], None, exact=False):
            broken.append({**names, "complaint": complaint})
        if (resources := outcomes[task].resources) is not None:
            budget = recorded.get(budgets.key(KNOWN[task.chip], case))
            bounds.append({**names, "bound": resources.bound, "budget": budget and budget.bound})
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
    """The provenance of a record: command of this module, date, commit and version of Triton."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "triton": metadata.version("triton"),
    }


def _commit() -> str | None:
    """The commit of the checkout; None outside of one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def progress_line() -> Callable[[int, int], None]:
    """Progress callback: finished cases and time left, one updated line on a terminal, else every hundred cases."""
    began = time.monotonic()

    def show(done: int, total: int) -> None:
        left = (time.monotonic() - began) * (total - done) / done
        line = f"{done}/{total} compiled, about {left / 60:.0f} min left"
        if sys.stderr.isatty():
            print(f"\r{line}", end=" " if done < total else "\n", file=sys.stderr, flush=True)
        elif done % 100 == 0 or done == total:
            print(line, file=sys.stderr, flush=True)

    return show


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttfm.kernels.proof.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--report", action="store_true", help="print the worst case of every kernel on every chip")
    parser.add_argument("--chips", default=",".join(KNOWN), help="comma-separated (default: %(default)s)")
    parser.add_argument("--kernels", default="", help="comma-separated prefixes of kernel files (default: all)")
    parser.add_argument("--heaviest", action="store_true", help="only the first and the heaviest case of every kernel")
    parser.add_argument("--unrecorded", action="store_true", help="only cases without a budget")
    parser.add_argument(
        "--update-budgets",
        action="store_true",
        help=f"record the results in {budgets.FILE.name} and in the table of {compile_report.PAGE.name}",
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="append broken rules and bounds as a JSON line")
    parser.add_argument("--workers", type=int, help="parallel processes (default: one per core)")
    args = parser.parse_args(argv)
    unknown = [name for name in args.chips.split(",") if name not in KNOWN]
    if unknown:
        parser.error(f"unknown chip {', '.join(unknown)}: choose from {', '.join(KNOWN)}")
    prefixes = [name for name in args.kernels.split(",") if name]
    cases = dict(enumerate_cases([KNOWN[name] for name in args.chips.split(",")], prefixes))
    if not cases:
        parser.error(f"no kernel file starts with {args.kernels}: choose from {', '.join(families())}")
    if args.heaviest:
        cases = {task: cases[task] for task in heaviest(cases)}
    if args.unrecorded:
        cases = {task: cases[task] for task in unrecorded(cases)}

    outcomes = compile_tasks(list(cases), args.workers, progress_line())
    if args.update_budgets:
        _update(cases, outcomes)
    if args.record:
        write_record(args.record, cases, outcomes)
    if args.report:
        rows = [(KNOWN[task.chip], case, outcomes[task]) for task, case in cases.items() if task.chip in CHIPS]
        print(compile_report.by_kernel(rows))
    failures = all_complaints(cases, outcomes)
    chips = len(args.chips.split(","))
    print(*failures, f"{len(cases)} cases on {chips} chips, {len(failures)} complaints", sep="\n", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; Triton's cache keeps the compiled kernels")
