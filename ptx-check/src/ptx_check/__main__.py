"""ptx-check SCRIPT: runs a Python script and executes its Triton kernel launches from their PTX on a CPU.

    ptx-check train_step.py --chips sm_80,sm_90 --report faults.sarif
    ptx-check --machine-code train_step.py          also execute the machine code and compare it with the PTX (sm_90)
    ptx-check --table                               instructions supported by each chip
    ptx-check ledger my_file.py --chips sm_90       cycles that the kernels' machine code needs of the chip's units

Exit status 1 if a kernel has a fault (the script continues after it) or the script fails.
"""

import argparse
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from ptx_check.version import __version__


def command() -> None:
    sys.exit(main(sys.argv[1:]))


def main(argv: list[str]) -> int:
    if argv[:1] == ["ledger"]:
        from ptx_check.ledger import command as ledger

        return ledger.main(argv[1:])
    what, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "ptx-check", description=what, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", nargs="?", type=Path)
    parser.add_argument("arguments", nargs="*", help="the script's arguments; its options follow --")
    parser.add_argument("--chips", default="sm_90", help="such as sm_80,sm_90 (default: sm_90)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the findings to FILE: .txt, .json or .sarif")
    parser.add_argument("--programs", type=int, metavar="N", help="execute a sample of N programs per launch")
    parser.add_argument(
        "--machine-code", action="store_true", help="execute the machine code too and compare it with the PTX (sm_90)"
    )
    parser.add_argument(
        "--ptxas",
        action="append",
        metavar="PATH",
        help="with --machine-code: assembler to use; may be repeated (default: Triton's)",
    )
    parser.add_argument("--table", action="store_true", help="print the instructions of each chip and stop")
    parser.add_argument("--version", action="version", version=__version__)
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.arguments += argv[end + 1 :]
    if args.table:
        from ptx_check.support import table

        print(table())
        return 0
    if args.script is None:
        parser.error("name a script, or --table")
    return _run(parser, args)


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from ptx_check.chips import CHIPS
    from ptx_check.faults import Unsupported
    from ptx_check.machine import executed
    from ptx_check.reports import Findings, as_text, form_of, write

    chips = args.chips.split(",")
    for chip in chips:
        if chip not in CHIPS:
            parser.error(f"--chips {chip}: choose among {', '.join(CHIPS)}")
    if args.report is not None:
        try:
            form_of(args.report)
        except ValueError as error:
            parser.error(f"--report {error}")
    if args.programs is not None and args.programs < 1:
        parser.error(f"--programs {args.programs}: must be at least 1")
    if not args.script.is_file():
        parser.error(f"{args.script} is not a file")
    options: dict[str, Any] = {"programs": args.programs}
    if args.machine_code:
        if chips != ["sm_90"]:
            parser.error(f"--machine-code is for --chips sm_90, not for {args.chips}")
        options |= {"machine_code": "compare", "ptxas": args.ptxas}
    for path in args.ptxas or ():
        if not args.machine_code:
            parser.error("--ptxas needs --machine-code")
        if not Path(path).is_file():
            parser.error(f"--ptxas {path} is not a file")
    findings, status = Findings(), 0
    sys.argv = [str(args.script), *args.arguments]
    sys.path.insert(0, str(args.script.resolve().parent))
    for chip in chips:
        with executed(chip, raising=False, **options) as machine:
            try:
                runpy.run_path(str(args.script), run_name="__main__")
            except Unsupported as error:
                print(f"ptx-check: on {chip}: {error}", file=sys.stderr)
                status = 2
            except SystemExit as error:
                if error.code is not None and not isinstance(error.code, int):
                    print(error.code, file=sys.stderr)
                status = status or (error.code if isinstance(error.code, int) else int(error.code is not None))
            except Exception:
                traceback.print_exc()
                status = status or 1
        findings.add(machine, str(args.script))
    print(as_text(findings), end="")
    if args.report is not None:
        write(findings, args.report)
    return status or (1 if findings.faults() else 0)


if __name__ == "__main__":
    command()
