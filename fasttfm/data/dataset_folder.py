"""Text of a folder that Hugging Face's datasets has saved: Dataset.save_to_disk() or DatasetDict.save_to_disk().

A row is a pair: {"translation": {"en": …, "de": …}}, as published translation data have it, or a column a language.
The text is written out beside the other corpora (fasttfm.data.datasets), line by line, and used from there.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fasttfm.data.datasets import Texts, write_pairs
from fasttfm.errors import UserError, optional
from fasttfm.folders import replacing
from fasttfm.wording import counted

_TRANSLATION = "translation"
_SPLITS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}
_ROWS = 1000  # read at a time


def text_of_folder(
    folder: Path, languages: tuple[str, str], data_dir: Path, *, say: Callable[[str], None] = print
) -> Texts:
    """Write the text of a saved dataset to data_dir/NAME, where NAME is the folder's; its files.

    languages: source and target, by the name of their column or their key in the column `translation`. A line break
    within a sentence becomes a space. Raises UserError without the package, and for a folder that has no training and
    validation split with text of both.
    """
    splits = _splits(folder)
    out = data_dir / folder.resolve().name
    if out.resolve() == folder.resolve():
        raise UserError(f"--data-dir {data_dir}: the text would be written into {folder} itself: choose another")
    pairs = {name: tuple(out / f"{name}.{language}" for language in languages) for name in splits}
    with replacing(out, "writing a dataset into it", "text of a dataset") as fresh:
        for name, rows in splits.items():
            sides = ((_one_line(source), _one_line(target)) for source, target in _pairs(rows, languages, folder))
            count = write_pairs(sides, *(fresh.path / path.name for path in pairs[name]))
            if not count:
                raise UserError(f"{folder}: its split {name} is empty: at least one pair is needed")
            say(f"{pairs[name][0]}, {pairs[name][1].name}: {counted(count, 'pair')}")
    (train_source, train_target), (valid_source, valid_target) = pairs["train"], pairs["valid"]
    tests = {"test": (pairs["test"][0], pairs["test"][1])} if "test" in pairs else {}
    return Texts(([train_source], [train_target]), ([valid_source], [valid_target]), tests)


def _splits(folder: Path) -> dict[str, Any]:
    """train, valid and, where there is one, test of a saved DatasetDict."""
    datasets = optional("datasets", "datasets")
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # of pyarrow, json, datasets and the system, whatever is damaged
        raise UserError(
            f"{folder}: is not what datasets' save_to_disk() writes: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(saved, datasets.DatasetDict):
        raise UserError(
            f"{folder}: holds one split: save a DatasetDict with train and validation, such as "
            "dataset.train_test_split() gives"
        )
    chosen = {name: next((saved[key] for key in keys if key in saved), None) for name, keys in _SPLITS.items()}
    for name in ("train", "valid"):
        if chosen[name] is None:
            raise UserError(f"{folder}: has no split {' or '.join(_SPLITS[name])} among {', '.join(saved)}")
    return {name: rows for name, rows in chosen.items() if rows is not None}


def _one_line(text: str | None) -> str:
    """A sentence as a line; a missing one is an empty line."""
    return (text or "").replace("\r", " ").replace("\n", " ")


def _pairs(rows: Any, languages: tuple[str, str], folder: Path) -> Iterator[tuple[str | None, str | None]]:
    """Both sides of every row."""
    features = rows.features
    names = {
        name for name, feature in features.items() if getattr(feature, "dtype", None) in ("string", "large_string")
    }
    nested = features.get(_TRANSLATION)
    if nested is not None:
        names = set(getattr(nested, "languages", None) or nested)
    if missing := [language for language in languages if language not in names]:
        raise UserError(f"{folder}: has no text {missing[0]}: --languages may name two of {', '.join(sorted(names))}")
    for block in rows.iter(batch_size=_ROWS):
        if nested is None:
            yield from zip(*(block[language] for language in languages), strict=True)
        else:
            for row in block[_TRANSLATION]:
                yield row[languages[0]], row[languages[1]]
