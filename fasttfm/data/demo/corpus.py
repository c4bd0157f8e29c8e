"""The built-in demo corpus: English and German sentences drawn from a grammar, the same on every machine.

It has what makes translation more than word by word: gender, case and adjective agreement, verb-second and verb-final
order, separable and modal verbs, compounds, numbers said unit first, dates, relative clauses. The German is a function
of the English, so a model can reach the reference exactly. Every sentence occurs once in all three splits together, on
either side: nothing that is tested was seen in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fasttfm.data.demo.sentences import Sentences
from fasttfm.errors import UserError

SPLITS = {"test": 500, "valid": 300, "train": 20_000}
"""Split -> number of pairs."""
SEED = 2017
_WORDS = range(4, 19)  # an English sentence has 4 to 18 words


def demo_pairs(seed: int = SEED) -> Iterator[tuple[str, str]]:
    """Different sentence pairs (English, German) without end; neither side ever repeats."""
    sentences = Sentences(seed)
    seen: set[str] = set()
    while True:
        english, german = sentences.next()
        # The marks keep a sentence of one language from hiding the same letters in the other.
        if len(english.split()) in _WORDS and not {"en " + english, "de " + german} & seen:
            seen |= {"en " + english, "de " + german}
            yield english, german


def demo_corpus() -> dict[str, list[tuple[str, str]]]:
    """Split -> its pairs."""
    pairs = demo_pairs()
    return {split: [next(pairs) for _ in range(size)] for split, size in SPLITS.items()}


def write_demo_corpus(directory: Path) -> list[Path]:
    """Write train, valid and test as .en and .de into directory, which is made. Returns the files.

    Raises UserError, before anything is written, where a file of such a name holds something else.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory}: exists and is not a directory: choose another --out")
    files = {
        directory / f"{split}.{language}": "".join(f"{pair[side]}\n" for pair in pairs).encode()
        for split, pairs in demo_corpus().items()
        for side, language in enumerate(("en", "de"))
    }
    for path, content in files.items():
        if path.exists() and not (
            path.is_file() and content.startswith(path.read_bytes())
        ):  # a kill leaves a beginning
            raise UserError(f"{path}: exists and is not the demo corpus: choose another --out, or move it away")
    directory.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        path.write_bytes(content)
    return [*files]
