"""A sample of cases for chips beside those of the compile matrix: one of every kernel file, with budgets of their own.

    python -m fasttfm.kernels.proof.sampled             compile the sample and hold it against sampled.csv
    python -m fasttfm.kernels.proof.sampled --update    record what came out

These chips take the tiles of their relatives (tiles/table.py), so that a whole matrix would say little more.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from fasttfm.kernels.chip import Chip, named
from fasttfm.kernels.proof import budgets, matrix
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import Resources, counted

FILE = Path(__file__).with_name("sampled.csv")


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        named("sm_103", 227 << 10, 160),  # B300
        named("sm_110", 227 << 10, 20),  # Jetson Thor
        named("sm_121", 99 << 10, 48),  # DGX Spark
        named("gfx1100", 64 << 10, 96),  # RX 7900 XTX
        named("gfx1201", 64 << 10, 64),  # RX 9070 XT
    )
}


def cases() -> Iterator[tuple[Chip, CompileCase]]:
    """The first case in bfloat16 of every kernel file, for each of these chips."""
    for chip in CHIPS.values():
        for of_family in matrix.families().values():
            yield chip, next(case for case in of_family(chip) if case.dtype == "bf16")


def complaints(chip: Chip, case: CompileCase, measured: Resources, budget: Resources | None) -> list[str]:
    """Name what is wrong with a case; its budget holds for the Triton that recorded it."""
    version, _ = budgets.read(FILE)
    grown = budgets.regressions(measured, budget) if metadata.version("triton") == version else []
    return budgets.broken_rules(chip, case, measured) + grown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fasttfm.kernels.proof.sampled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kernels", default="", help="beginning of the cases' names (default: all)")
    parser.add_argument("--update", action="store_true", help="write sampled.csv anew")
    args = parser.parse_args(argv)
    update = args.update
    if update and args.kernels:
        parser.error("--update records the whole sample: leave --kernels out")
    known = {} if update else budgets.read(FILE)[1]
    found: dict[budgets.Key, Resources] = {}
    wrong = 0
    for chip, case in cases():
        if not case.name.startswith(args.kernels):
            continue
        key = budgets.key(chip, case)
        found[key] = counted.of_case(chip, case).resources
        rules = budgets.broken_rules(chip, case, found[key])
        for complaint in rules if update else complaints(chip, case, found[key], known.get(key)):
            print(f"{chip.name} {case.name} {case.dtype} {complaint}")
            wrong += 1
    if update:
        budgets.write(metadata.version("triton"), found, FILE)
    print(f"{len(found)} cases on {len(CHIPS)} chips, {wrong} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
