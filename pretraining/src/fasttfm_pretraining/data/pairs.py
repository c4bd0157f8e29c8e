"""Labelled sentences or sentence pairs: CSV, TSV or JSON lines with a header."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fasttfm.errors import UserError
from fasttfm_pretraining.data.tables import read_table

LABEL = "label"


@dataclass(frozen=True, slots=True)
class LabelledText:
    """One or two texts with their label."""

    first: str
    second: str | None
    label: str | None
    """None if the file has no labels."""


def read_pairs(path: Path | str, columns: Sequence[str] = ()) -> list[LabelledText]:
    """Read the rows of a file: column `label` is the label, the one or two other columns are the texts.

    columns: the one or two text columns if the file has more. Raises UserError with the line.
    """
    path = Path(path)
    rows = read_table(path, columns)
    names = list(columns) or text_columns(rows[0].values)
    if not 1 <= len(names) <= 2:
        raise UserError(f"{path}: has the columns {', '.join(names)}: name the one or two texts with --columns A,B")
    examples = []
    for row in rows:
        texts = [row.values.get(name) for name in names]
        if None in texts:
            raise UserError(f"{row.where}: has no column {names[texts.index(None)]}; it has {', '.join(row.values)}")
        second = texts[1] if len(texts) == 2 else None
        examples.append(LabelledText(texts[0] or "", second, row.values.get(LABEL)))
    return examples


def text_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns of texts: all but the label."""
    return [name for name in columns if name != LABEL]


def label_names(examples: Sequence[LabelledText], path: Path | str) -> list[str]:
    """Distinct labels: numbers by value, names alphabetically; the same in every process.

    Raises UserError if one is missing or all are equal.
    """
    for number, example in enumerate(examples, start=1):
        if example.label is None:
            raise UserError(f"{path}: row {number:,} has no {LABEL}: give a column of that name")
    labels = {example.label for example in examples if example.label is not None}
    if len(labels) < 2:
        raise UserError(f"{path}: every row has the label {min(labels)!r}: give rows of at least two labels")
    try:
        return sorted(sorted(labels), key=float)
    except ValueError:
        return sorted(labels)


def label_numbers(examples: Sequence[LabelledText], names: Sequence[str], path: Path | str) -> list[int]:
    """Index of each example's label in names. Raises UserError for an unknown label."""
    class_of = {name: number for number, name in enumerate(names)}
    numbers = []
    for row, example in enumerate(examples, start=1):
        if example.label not in class_of:
            raise UserError(f"{path}: row {row:,} has the label {example.label!r}, the model knows {', '.join(names)}")
        numbers.append(class_of[example.label])
    return numbers
