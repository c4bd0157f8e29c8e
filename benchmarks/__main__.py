"""Times fasttfm and its peers; every row is kept as a record.

    python -m benchmarks                          all groups, on this machine's device
    python -m benchmarks --quick kernels blocks   some groups, in a few minutes
    python -m benchmarks end_to_end demo          from text to BLEU in minutes; part of --full
    python -m benchmarks report                   a page from all records
    python -m benchmarks compare OLD NEW          changes between two files of records

docs/benchmarks.md explains rows and methods, and how to add a case or a provider.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import command
from benchmarks.cases import GROUPS
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import RESULTS
from benchmarks.measure.text_table import duration
from fasttfm.cli.parser import THREADS, Parser
from fasttfm.errors import UserError
from fasttfm.system.machine import multiplies_bfloat16, pick_device

if TYPE_CHECKING:
    import torch

    from benchmarks.measure.case import Case, Setting
    from benchmarks.measure.records import Record

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
COMMANDS = {
    "report": "benchmarks.report.page",
    "compare": "benchmarks.report.compare",
    "check": "benchmarks.measure.check",
    "end_to_end": "benchmarks.end_to_end",
    "host": "benchmarks.host",
    "queue": "benchmarks.queue.run",
}
DTYPES = ("float32", "float16", "bfloat16")
SECONDS = {"smoke": 0.0, "quick": 0.3, "standard": 1.0, "full": 3.0}
"""Duration of the timed runs of a case, all providers together."""
LEAST_ROUNDS = {"smoke": 1, "quick": 5, "standard": 10, "full": 20}


def _parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks",
        description=__doc__.split("\n\n")[0],
        epilog="Also: `python -m benchmarks end_to_end demo`, from text to BLEU in minutes (--full runs it after all "
        "groups), `python -m benchmarks report` and `python -m benchmarks compare OLD NEW`, each with its own --help. "
        "Ctrl-C keeps finished cases. docs/benchmarks.md explains rows.",
    )
    add = parser.add_argument
    add("groups", nargs="*", metavar="GROUP", help=f"any of {', '.join(GROUPS)} (default: all)")
    add("--only", default="", metavar="TEXT", help="cases whose progress line contains TEXT")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="fewer cases and runs: minutes for all groups")
    level.add_argument("--full", action="store_true", help="more shapes and runs, for published records")
    level.add_argument("--smoke", action="store_true", help="smallest shapes, to check that everything runs")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if available)")
    add("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)} (default: the device's training dtype)")
    add("--out", type=Path, metavar="DIR", help="folder for records (default: benchmarks/results; none with --smoke)")
    add("--threads", type=THREADS, help="CPU threads (default: one per core)")
    add("--seed", type=int, default=0, help="seed of the inputs (default: %(default)s)")
    add("--list", action="store_true", help="list the cases and exit")
    return parser


def setting_of(args: argparse.Namespace) -> Setting:
    """Device, dtype and level from the arguments. Raises UserError for an unavailable device or unknown dtype."""
    import torch

    from benchmarks.measure.case import Setting

    device = pick_device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {device} cannot be timed: use cpu, cuda or cuda:N")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if args.dtype not in (None, *DTYPES):
        raise UserError(f"--dtype {args.dtype} is unknown: {', '.join(DTYPES)}")
    threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    level = next((name for name in ("quick", "full", "smoke") if getattr(args, name)), "standard")
    dtype = training = getattr(torch, args.dtype) if args.dtype else usual_dtype(device)
    if args.dtype is None and device.type == "cpu" and multiplies_bfloat16(device):
        training = torch.bfloat16
    return Setting(device=device, dtype=dtype, training_dtype=training, level=level, seed=args.seed, threads=threads)


def usual_dtype(device: torch.device) -> torch.dtype:
    """Default training dtype: bfloat16 from sm_80 on and on AMD GPUs, float16 on sm_70 and sm_75, else float32."""
    import torch

    if device.type == "cpu":
        return torch.float32
    capability = torch.cuda.get_device_capability(device)
    return torch.bfloat16 if capability >= (8, 0) else torch.float16 if capability >= (7, 0) else torch.float32


def chosen_cases(groups: Sequence[str], only: str, setting: Setting) -> list[Case]:
    """Cases of the groups, in order. Raises UserError for an unknown group, or if no case matches `only`."""
    for group in groups:
        if group in COMMANDS:
            raise UserError(f"{group} is a command of its own: python -m benchmarks {group} --help")
        if group not in GROUPS:
            raise UserError(f"{group} is not a group: {', '.join(GROUPS)} (or {', '.join(COMMANDS)})")
    cases = [c for g in GROUPS if not groups or g in groups for c in importlib.import_module(GROUPS[g]).cases(setting)]
    left = [case for case in cases if only in f"{case.group} {case.title}"]
    if not left:
        raise UserError(f"no case contains {only!r}: --list names all {len(cases)} cases")
    return left


def summary(rows: Sequence[Record]) -> str:
    """One line for a case: each provider's time, and its ratio to ours."""
    times = {row["provider"]: row["time_us"]["p50"] for row in rows if row["time_us"]}
    ours = times.get(OURS)
    parts = [
        f"{name} {duration(time)}{'' if ours is None or name == OURS else f' ({time / ours:.2f}x)'}"
        for name, time in times.items()
    ]
    for status in ("wrong", "refused", "absent"):
        names = [row["provider"] for row in rows if row["status"] == status]
        parts += [f"{status}: {', '.join(names)}"] if names else []
    return "; ".join(parts)


def run_cases(cases: Sequence[Case], setting: Setting, out: Path | None) -> int:
    """Runs the cases and writes the rows of each to a file in `out` as it ends. Returns 1 if a case raised."""
    import torch

    from benchmarks.measure import clocks, harness, machine, records
    from fasttfm.system.memory import keep_freed_memory

    keep_freed_memory()
    warnings.simplefilter("ignore")  # the row has the reason of a refusal
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    ceiling = clocks.ceilings(setting)
    described = machine.describe()  # after the ceilings: an idle device reports idle clocks
    print(
        f"{machine.machine_name(described)}, {setting.threads} CPU threads, {setting.dtype_name}: copies "
        f"{ceiling.bandwidth / 1e9:.3g} GB/s, products {ceiling.flops / 1e12:.3g} TFLOP/s",
        flush=True,
    )
    began = time.monotonic()
    files: dict[Path, None] = {}
    timed: list[Record] = []
    broken = 0
    for number, case in enumerate(cases, 1):
        minutes = (time.monotonic() - began) * (len(cases) - number + 1) / max(number - 1, 1) / 60
        left = f", about {minutes:.0f} min left" if number > 1 else ""
        print(f"[{number}/{len(cases)}{left}] {case.group} {case.title}", flush=True)
        in_dtype = dataclasses.replace(setting, dtype=getattr(torch, case.dtype))
        try:
            rows = harness.run(
                case,
                setting,
                clocks.clock_of(case, setting),
                SECONDS[setting.level],
                ceilings=clocks.ceilings(in_dtype),
                machine=described,
                least_rounds=LEAST_ROUNDS[setting.level],
            )
        except Exception:  # the other cases can still be measured
            traceback.print_exc()
            broken += 1
            continue
        if out is not None:
            file = out / records.file_name(case.group, described)
            records.write(file, rows)
            files[file] = None
        print(f"    {summary(rows)}", flush=True)
        timed += [row for row in rows if row["time_us"]]
    if noisy := sum(row["noisy"] for row in timed):
        advice = "stop other programs on this machine and measure again"
        print(f"{noisy} of {len(timed)} rows are noisy after two measurements: {advice}")
    for file in files:
        print(f"kept in {file}")
    if broken:
        print(f"{broken} of {len(cases)} cases raised an error (see above)", file=sys.stderr)
    return 1 if broken else 0


def main(argv: Sequence[str] | None = None) -> int:
    return command.run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["check"]:  # without files: README, report and pictures against the records
        return importlib.import_module(COMMANDS["report"]).check()
    if arguments and arguments[0] in COMMANDS:
        return importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:])
    args = _parser().parse_args(arguments)
    setting = setting_of(args)
    cases = chosen_cases(args.groups, args.only, setting)
    if args.list:
        print("\n".join(f"{case.group} {case.title}" for case in cases))
        return 0
    out = args.out or (None if setting.level == "smoke" else RESULTS)
    if out is not None:
        command.writable(out)
    status = run_cases(cases, setting, out)
    if args.full and not args.groups and not args.only:
        from benchmarks import end_to_end

        end_to_end.run_built_in(out or RESULTS, args.device, args.threads)
    return status


if __name__ == "__main__":
    sys.exit(main())
