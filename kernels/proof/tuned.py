"""True if a file of `fasttfm tune` is fit to ship in kernels/tiles/tuned.

python -m fasttfm.kernels.proof.tuned FILE...
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from fasttfm.kernels import choice_cache, choices
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.matrix import families


def complaints(file: Path) -> list[str]:
    """Name what is wrong with it: damaged, of a chip that the matrix does not compile for, or answers nobody offers."""
    families()  # imports every kernel file, and with it every choice
    try:
        system, answers = choice_cache.parse(file)
    except ValueError as error:
        return [f"damaged: {error}"]
    chip = CHIPS.get(system["chip"])
    if chip is None:
        return [f"measured on {system['chip']}, which is none of {', '.join(CHIPS)}"]
    wrong = []
    for (name, size_class), measured in answers.items():
        if name not in choices.CHOICES:
            wrong.append(f"there is no choice {name}")
            continue
        try:
            if measured.answer not in choices.CHOICES[name].answers(chip, *size_class):
                wrong.append(f"{measured.answer} is no answer that {name} can give for {size_class}")
        except (TypeError, ValueError) as error:
            wrong.append(f"{name} {size_class}: {error}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    files = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    if not files:
        print("usage: python -m fasttfm.kernels.proof.tuned FILE...", file=sys.stderr)
        return 2
    wrong = [f"{file}: {complaint}" for file in files for complaint in complaints(file)]
    for line in wrong:
        print(line)
    if not wrong:
        print(f"{len(files)} files fit to ship: copy them into {choice_cache.SHIPPED}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
