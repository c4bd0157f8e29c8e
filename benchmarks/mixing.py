"""Evenness of updates: the spread of lengths and sources over the updates of an epoch, as counts.

    python -m benchmarks.mixing --text data/tatoeba_ende data/wmt_news_ende

Each --text is a source: a folder with train.en and train.de, plain or .gz. The pairs of all are one corpus, in pieces
of one vocabulary, and are cut into updates of as many tokens in several ways: one batch an update, batches in any
order, batches of all lengths (what training does), and pairs drawn at random, for comparison. Told are, over updates,
the share of each source, the updates that have nearly one source, the mean target length, and the padding; and what
share of the time ranks compute that divide an update's cells. Nothing is timed. Appends one line to
benchmarks/results/mixing.jsonl.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.measure import text_table
from fasttfm.data.batches import TokenBatches
from fasttfm.data.corpus import read_lines
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.tokenizer import train_tokenizer
from fasttfm.errors import UserError

TOKENS = 25_000
"""Of an update on each side, padding counted: the paper's."""
NEARLY = 0.9
_RANKS = (2, 8)
_VOCABULARY_LINES = 50_000


def read(folders: Sequence[Path], languages: Sequence[str], vocab_size: int) -> tuple[ParallelTokens, np.ndarray]:
    """The pairs of all folders as ids of a joint vocabulary, and the number of each pair's source (pairs,)."""
    sides: list[list[str]] = [[], []]
    sources: list[int] = []
    for number, folder in enumerate(folders):
        for lines, language in zip(sides, languages, strict=True):
            file = next(filter(Path.is_file, (folder / f"train.{language}{end}" for end in ("", ".gz"))), None)
            if file is None:
                raise UserError(f"{folder}: has no train.{language} and no train.{language}.gz")
            lines += read_lines(file)
        sources += [number] * (len(sides[0]) - len(sources))
    step = max(1, len(sources) * 2 // _VOCABULARY_LINES)
    tokenizer = train_tokenizer([line for lines in sides for line in lines[::step]], vocab_size=vocab_size)
    return ParallelTokens.from_lists(*map(tokenizer.encode_lines, sides)), np.array(sources)


def grouped(order: Sequence[np.ndarray], together: int) -> list[list[np.ndarray]]:
    """Whole updates of an epoch's batches."""
    return [list(order[begin : begin + together]) for begin in range(0, len(order) - together + 1, together)]


def spread(updates: Sequence[np.ndarray], pairs: ParallelTokens, sources: np.ndarray) -> dict[str, Any]:
    """Return how updates (arrays of pairs' numbers) differ."""
    tokens = [pairs.target_lengths[each] + 1 for each in updates]
    count, sums = int(sources.max()) + 1, np.array([each.sum() for each in tokens])
    shares = np.array(
        [np.bincount(sources[each], weights, count) / weights.sum() for each, weights in zip(updates, tokens)]
    )
    lengths = np.array([each.mean() for each in tokens])
    return {
        "updates": len(updates),
        "source_shares": np.round(shares.mean(axis=0), 4).tolist(),
        "source_share_deviation": round(float(shares.std(axis=0).max()), 4),
        "nearly_one_source": round(float((shares.max(axis=1) > NEARLY).mean()), 4),
        "target_length": round(float(lengths.mean()), 2),
        "target_length_deviation": round(float(lengths.std()), 2),
        "tokens_deviation": round(float(sums.std() / sums.mean()), 4),
    }


def at_random(pairs: ParallelTokens, count: int, kept: np.ndarray) -> list[np.ndarray]:
    """The kept pairs, drawn in random order into `count` updates of as many target tokens each."""
    order = np.random.default_rng(0).permutation(kept)
    ends = np.cumsum(pairs.target_lengths[order] + 1)
    return np.split(order, np.searchsorted(ends, np.linspace(0, ends[-1], count + 1)[1:-1]))


def busy(batches: TokenBatches, updates: Sequence[Sequence[np.ndarray]], ranks: int) -> float:
    """The mean share of an update's time for which ranks compute, were time the cells of their batches."""
    cells = np.array([[len(each) * int(batches.padded_to(each[0]).sum()) for each in update] for update in updates])
    of_rank = cells.reshape(len(updates), ranks, -1).sum(axis=2)
    return round(float((of_rank.mean(axis=1) / of_rank.max(axis=1)).mean()), 4)


def measure(pairs: ParallelTokens, sources: np.ndarray, tokens: int, together: int) -> list[dict[str, Any]]:
    """A row a way."""
    rows = []
    whole = TokenBatches(pairs, tokens, seed=1, max_length=256)
    parts = TokenBatches(pairs, tokens // together, seed=1, max_length=256, together=together)
    order = parts.epoch(0)
    shuffled = [order[i] for i in np.random.default_rng(1).permutation(len(order))]
    ways = {
        "one batch": (whole, grouped(whole.epoch(0), 1)),
        f"{together} batches in any order": (parts, grouped(shuffled, together)),
        f"{together} batches of all lengths": (parts, grouped(order, together)),
    }
    for name, (batches, updates) in ways.items():
        row = {"update": name, **spread([np.concatenate(each) for each in updates], pairs, sources)}
        row |= {"padding": round(batches.padding_ratio, 4), "shapes": batches.shapes}
        divided = [ranks for ranks in _RANKS if len(updates[0]) % ranks == 0]
        rows.append(row | {f"busy_of_{ranks}_ranks": busy(batches, updates, ranks) for ranks in divided})
    kept = np.concatenate(list(order))
    rows.append({"update": "pairs at random", **spread(at_random(pairs, len(order) // together, kept), pairs, sources)})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as lines of text."""
    columns = ("updates", "source_share_deviation", "nearly_one_source", "target_length_deviation", "padding", "shapes")
    header = ["", *(name.replace("_", " ") for name in columns)]
    return text_table.aligned(
        [header, *([row["update"], *(str(row.get(name, "-")) for name in columns)] for row in rows)]
    )


@command.program(
    command.flag("--text", type=Path, nargs="+", required=True, help="a folder a source"),
    command.flag("--languages", nargs=2, default=["en", "de"], help="(default: en de)"),
    command.flag("--tokens", type=int, default=TOKENS, help="of an update (default: %(default)s)"),
    command.flag("--together", type=int, default=8, help="batches of an update (default: %(default)s)"),
    command.vocab_size(8000),
)
def main(args: Any) -> dict[str, Any]:
    pairs, sources = read(args.text, args.languages, args.vocab_size)
    measured = measure(pairs, sources, args.tokens, args.together)
    print(table(measured))
    return {"pairs": np.bincount(sources).tolist(), "measured": measured}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
