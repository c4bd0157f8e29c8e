"""Times fasttfm beside its peers and keeps a record of every row.

    python -m benchmarks                          every group, this machine's device
    python -m benchmarks --quick kernels blocks   some groups, in a few minutes
    python -m benchmarks end_to_end demo          from text to BLEU, in minutes; --full does that too
    python -m benchmarks report                   one page from all records
    python -m benchmarks compare OLD NEW          what changed between two files of records

docs/benchmarks.md says how to read a row, what is measured how, and how to add a case or a provider.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
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
"""Of timed runs a case, all its providers together."""
_NOISE = "rows are noisy, measured twice: something else runs on this machine; close it and measure again"
LEAST_ROUNDS = {"smoke": 1, "quick": 5, "standard": 10, "full": 20}


def _parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks",
        description=__doc__.split("\n\n")[0],
        epilog="Also: `python -m benchmarks end_to_end demo`, from text to BLEU in minutes (--full runs it after all "
        "groups), `python -m benchmarks report` and `python -m benchmarks compare OLD NEW`, each with its own --help. "
        "Stopping with Ctrl-C keeps what was measured. docs/benchmarks.md tells how to read a row.",
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line of progress contains TEXT")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="fewer cases and runs: minutes for all groups")
    level.add_argument("--full", action="store_true", help="more shapes and runs: for a record to publish")
    level.add_argument("--smoke", action="store_true", help="the smallest shapes, to see that all runs")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)} (default: what the device trains in)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the records (default: benchmarks/results, nothing for --smoke)",
    )
    parser.add_argument("--threads", type=THREADS, help="of the CPU (default: one a core)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="only what was kept where, warnings and errors")
    parser.add_argument(
        "--json", action="store_true", help="every record as a JSON line on standard output; words go to standard error"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    return parser


def setting_of(args: argparse.Namespace) -> Setting:
    """The device, dtype and level that the arguments ask for. Raises UserError for what is not here."""
    import torch

    from benchmarks.measure.case import Setting

    device = pick_device(args.device)
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {device} is not one that fasttfm is timed on: cpu, cuda or cuda:N")
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
    """Return the usual dtype of training: bfloat16 from sm_80 and on AMD's, float16 on sm_70 and 75, else float32."""
    import torch

    if device.type == "cpu":
        return torch.float32
    capability = torch.cuda.get_device_capability(device)
    return torch.bfloat16 if capability >= (8, 0) else torch.float16 if capability >= (7, 0) else torch.float32


def chosen_cases(groups: Sequence[str], only: str, setting: Setting) -> list[Case]:
    """The cases of the groups, in order. Raises UserError for a group that is not one, or when no case is left."""
    for group in groups:
        if group in COMMANDS:
            raise UserError(f"{group} is a command of its own: python -m benchmarks {group} --help")
        if group not in GROUPS:
            raise UserError(f"{group} is no group: {', '.join(GROUPS)} (or {', '.join(COMMANDS)})")
    cases = [c for g in GROUPS if not groups or g in groups for c in importlib.import_module(GROUPS[g]).cases(setting)]
    left = [case for case in cases if only in f"{case.group} {case.title}"]
    if not left:
        raise UserError(f"no case contains {only!r}: --list names the {len(cases)} cases that there are")
    return left


def summary(rows: Sequence[Record]) -> str:
    """A case's rows on one line: times, and what others take for one of ours."""
    times = {row["provider"]: row["time_us"]["p50"] for row in rows if row["time_us"]}
    ours = times.get(OURS)
    words = [
        f"{name} {duration(time)}{'' if ours is None or name == OURS else f' ({time / ours:.2f}x)'}"
        for name, time in times.items()
    ]
    for status in ("wrong", "refused", "absent"):
        names = [r["provider"] for r in rows if r["status"] == status]
        words += [f"{status}: {', '.join(names)}"] if names else []
    return "; ".join(words)


def run_cases(
    cases: Sequence[Case], setting: Setting, out: Path | None, *, quiet: bool = False, as_json: bool = False
) -> int:
    """Runs the cases; each one's rows go to a file in out as soon as they are known. Returns 1 if a case was broken.

    quiet: say nothing of a case. as_json: print the rows, a JSON line each, and say all else on standard error.
    """
    import torch

    from benchmarks.measure import harness, machine, records
    from benchmarks.measure.clocks import Clocks, ceilings
    from fasttfm.system.memory import keep_freed_memory

    keep_freed_memory()
    warnings.simplefilter("ignore")  # why a provider refused is in its row
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    clocks = Clocks(setting.device)
    ceiling = ceilings(setting)
    described = machine.describe()  # after the ceilings: a device at rest would tell the clocks of one at rest
    in_dtype = {setting.dtype_name: ceiling}
    words = sys.stderr if as_json else sys.stdout

    def note(line: str) -> None:
        if not quiet:
            print(line, file=words, flush=True)

    note(
        f"{machine.machine_name(described)}, {setting.threads} CPU threads, {setting.dtype_name}: copies "
        f"{ceiling.bandwidth / 1e9:.3g} GB/s, products {ceiling.flops / 1e12:.3g} TFLOP/s"
    )
    began = time.monotonic()
    files: dict[Path, None] = {}
    broken = timed = noisy = 0
    for number, case in enumerate(cases, 1):
        minutes = (time.monotonic() - began) * (len(cases) - number + 1) / max(number - 1, 1) / 60
        left = f", about {minutes:.0f} min left" if number > 1 else ""
        note(f"[{number}/{len(cases)}{left}] {case.group} {case.title}")
        if case.dtype not in in_dtype:  # a training step's may be another than the kernels'
            other = dataclasses.replace(setting, dtype=getattr(torch, case.dtype))
            in_dtype[case.dtype] = ceilings(other)
        try:
            rows = harness.run(
                case,
                setting,
                clocks.of(case),
                SECONDS[setting.level],
                ceilings=in_dtype[case.dtype],
                machine=described,
                least_rounds=LEAST_ROUNDS[setting.level],
            )
        except Exception:  # a fault of the case: the others can still be measured
            traceback.print_exc()
            broken += 1
            continue
        if out is not None:
            file = out / records.file_name(case.group, described)
            records.write(file, rows)
            files[file] = None
        note(f"    {summary(rows)}")
        for row in rows if as_json else ():
            print(json.dumps(row), flush=True)
        timed += sum(row["time_us"] is not None for row in rows)
        noisy += sum(row.get("noisy", False) for row in rows)
    if noisy:
        print(f"{noisy} of {timed} {_NOISE}", file=words)
    for file in files:
        print(f"kept in {file}", file=words)
    if broken:
        print(f"{broken} of {len(cases)} cases are broken (see above)", file=sys.stderr)
    return 1 if broken else 0


def main(argv: Sequence[str] | None = None) -> int:
    return command.run(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
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
    status = run_cases(cases, setting, out, quiet=args.quiet, as_json=args.json)
    if args.full and not args.groups and not args.only:
        from benchmarks import end_to_end

        end_to_end.run_built_in(out or RESULTS, args.device, args.threads)
    return status


if __name__ == "__main__":
    sys.exit(main())
