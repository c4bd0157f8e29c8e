"""Counts the cycles that kernels' machine code needs of each unit of a chip, without a GPU: lower bounds, not times.

ptx-check ledger my_file.py --chips sm_90               Triton kernels launched by a file
ptx-check ledger --peer lib.so --match 'flash_fwd'      cubins in a shared library
ptx-check ledger --validate                             published times compared with the bound
"""

import argparse
import re
import sys
from pathlib import Path

from ptx_check.ledger import collect, gcn, peers, published, report, resources

CHIPS = (*resources.MULTIPROCESSORS, *(name for name in gcn.RATES if name.startswith("gfx9")))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "ptx-check ledger", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, help="a Python file that launches Triton kernels")
    parser.add_argument("--chips", default="", help="such as sm_80,gfx942 (default: the file's own, or sm_80,sm_90)")
    parser.add_argument("--match", default="", help="count only kernels whose name matches this regular expression")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="shared library whose CUDA kernels are counted too")
    parser.add_argument(
        "--validate", action="store_true", help="print the share of the bound that published times reach"
    )
    args = parser.parse_args(argv)
    chips = [name for name in args.chips.split(",") if name]
    if unknown := [name for name in chips if name not in CHIPS]:
        parser.error(f"unknown chip {', '.join(unknown)}: choose from {', '.join(CHIPS)}")
    try:
        wanted = re.compile(args.match)
    except re.error as error:
        parser.error(f"--match {args.match!r} is not a regular expression: {error}")
    if sum(map(bool, (args.file, args.peer, args.validate))) != 1:
        parser.error("give one of a file, --peer and --validate")
    for file in (args.peer, args.file):
        if file is not None and not file.is_file():
            parser.error(f"there is no file {file}")
    if args.validate:
        print(published.table())
        return 0
    return _peer(args.peer, wanted) if args.peer else _file(args.file, chips, wanted)


def _file(file: Path, chips: list[str], wanted: re.Pattern[str]) -> int:
    try:
        found = collect.run_file(file, chips)
    except (SyntaxError, UnicodeDecodeError) as error:
        return _nothing(f"{file} cannot be read as Python: {error}")
    except SystemExit as error:
        return _nothing(f"{file} ended with {error!r} before its kernels were counted: it is run without arguments")
    print(report.of_found(found, wanted))
    return 0 if found else _nothing(f"{file} launches no Triton kernel")


def _peer(library: Path, wanted: re.Pattern[str]) -> int:
    try:
        found = list(peers.peers(library, wanted))
    except ValueError as error:
        return _nothing(str(error))
    print(report.of_peers(found))
    return 0 if found else _nothing(f"no kernel of {library} has a match of {wanted.pattern!r}")


def _nothing(why: str) -> int:
    print(why, file=sys.stderr)
    return 1
