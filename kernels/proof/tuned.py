"""Checks files written by `fasttfm tune` before they ship in kernels/tiles/tuned.

python -m fasttfm.kernels.proof.tuned FILE...
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from fasttfm.kernels import choice_cache, choices
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.matrix import families


def complaints(file: Path) -> list[str]:
    """The faults of a file: damaged, for a chip outside of the compile matrix, or with invalid answers."""
    families()  # imports every kernel file, and so defines every choice
    try:
        system, answers = choice_cache.parse(file)
    except ValueError as error:
        return [f"damaged: {error}"]
    chip = CHIPS.get(system["chip"])
    if chip is None:
        return [f"measured on {system['chip']}, which is not one of {', '.join(CHIPS)}"]
    faults = []
    for (name, size_class), measured in answers.items():
        if name not in choices.CHOICES:
            faults.append(f"there is no choice {name}")
            continue
        try:
            if measured.answer not in choices.CHOICES[name].answers(chip, *size_class):
                faults.append(f"{measured.answer} is not an answer of {name} for {size_class}")
        except (TypeError, ValueError) as error:
            faults.append(f"{name} {size_class}: {error}")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    files = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    if not files:
        print("usage: python -m fasttfm.kernels.proof.tuned FILE...", file=sys.stderr)
        return 2
    faults = [f"{file}: {complaint}" for file in files for complaint in complaints(file)]
    print(*faults or [f"{len(files)} valid files: copy them into {choice_cache.SHIPPED}"], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
