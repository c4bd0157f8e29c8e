"""The built-in demo corpus: English and German sentences sampled from a grammar, the same on every machine.

It needs more than word-by-word translation: gender, case and adjective agreement, verb-second and verb-final order,
separable and modal verbs, numbers with the unit first, relative clauses. The German is a function of the English, so a
model can reach the reference exactly. No sentence of either side occurs twice in the three splits together, so no test
sentence was seen in training.
"""

from collections.abc import Iterator
from pathlib import Path

from fasttfm.data.demo.sentences import Sentences
from fasttfm.system.files import write_file
from fasttfm.system.folders import replacing

SPLITS = {"test": 500, "valid": 300, "train": 20_000}
"""Split -> number of pairs."""
SEED = 2017


def demo_pairs(seed: int = SEED) -> Iterator[tuple[str, str]]:
    """An infinite iterator of (English, German) pairs of 4 to 18 English words; neither side ever repeats."""
    sentences = Sentences(seed)
    seen: set[str] = set()
    while True:
        english, german = sentences.next()
        # prefixes keep the two languages apart
        if 4 <= len(english.split()) <= 18 and not {"en " + english, "de " + german} & seen:
            seen |= {"en " + english, "de " + german}
            yield english, german


def demo_corpus() -> dict[str, list[tuple[str, str]]]:
    """Split -> its pairs."""
    pairs = demo_pairs()
    return {split: [next(pairs) for _ in range(size)] for split, size in SPLITS.items()}


def write_demo_corpus(directory: Path) -> list[Path]:
    """Write train, valid and test as .en and .de into `directory`, atomically; returns the files.

    Raises UserError for a directory with other files.
    """
    names = []
    with replacing(directory, "writing the demo corpus into it", "demo corpus") as fresh:
        for split, pairs in demo_corpus().items():
            for side, language in enumerate(("en", "de")):
                names.append(f"{split}.{language}")
                write_file(fresh.path / names[-1], "".join(f"{pair[side]}\n" for pair in pairs).encode())
    return [directory / name for name in names]
