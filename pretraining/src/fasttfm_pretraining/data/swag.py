"""Multiple-choice data: the official CSV of SWAG.

Each line has a first sentence (sent1), how the second one begins (sent2), four endings (ending0 ... ending3) and, in
training and validation files, the number of the right one (label). Other columns are not read.
Source: Zellers et al. 2018.
"""

from dataclasses import dataclass
from pathlib import Path

from fasttfm.errors import UserError
from fasttfm_pretraining.data.tables import read_table

ENDINGS = ("ending0", "ending1", "ending2", "ending3")


@dataclass(frozen=True, slots=True)
class Choices:
    """A context and its candidate continuations."""

    context: str
    choices: tuple[str, ...]
    label: int | None
    """Index of the right choice; None in a test file."""


def read_swag(path: Path | str, *, answered: bool = True) -> list[Choices]:
    """Read a file in the official form; each choice is sent2 with one ending.

    answered: False does not read labels. Raises UserError with the line for a missing column or value and for a label
    other than 0 to 3.
    """
    examples = []
    for row in read_table(Path(path), ("sent1", "sent2", *ENDINGS)):
        label = row.values.get("label") if answered else None
        if label is not None and label not in ("0", "1", "2", "3"):
            raise UserError(f"{row.where}: label is {label!r}, it must be 0, 1, 2 or 3: correct that line")
        choices = tuple(f"{row.values['sent2']} {row.values[ending]}".strip() for ending in ENDINGS)
        examples.append(Choices(row.values["sent1"], choices, None if label is None else int(label)))
    return examples
