"""Cost of `fasttfm prepare`: seconds and peak memory for corpora of several sizes.

    python -m benchmarks.preparing --pairs 100000 1000000
    python -m benchmarks.preparing --pairs 1000000 10000000     about 20 minutes and 8 GB of disk, half of it text

The text is drawn from a fixed vocabulary of made-up words whose frequencies fall as 1/rank, about 25 words a side, so
that the vocabulary and the digests have real work. Each size is prepared by the command line, duplicates left out, in a
process of its own, which tells its peak resident memory. Appends one line to benchmarks/results/preparing.jsonl.
"""

import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command
from fasttfm.children import calling
from fasttfm.cli.main import main as run_command
from fasttfm.memory import peak_memory

WORDS = 60_000
WIDTH = 25
"""Words a side, on average."""
_VALID = 500


def write_text(folder: Path, pairs: int, seed: int = 0) -> None:
    """train.en, train.de, valid.en and valid.de; pairs: of training."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    words = ["".join(rng.choice(letters, size)) for size in rng.integers(2, 11, WORDS)]
    shares = 1 / np.arange(1, WORDS + 1)
    shares /= shares.sum()
    for split, count in (("train", pairs), ("valid", _VALID)):
        for side in ("en", "de"):
            with (folder / f"{split}.{side}").open("w") as file:
                for begin in range(0, count, 10_000):
                    lengths = rng.integers(WIDTH - 20, WIDTH + 21, min(10_000, count - begin))
                    drawn = iter(rng.choice(WORDS, int(lengths.sum()), p=shares))
                    file.writelines(
                        " ".join(words[next(drawn)] for _ in range(length)) + ".\n" for length in lengths.tolist()
                    )


def prepare(folder: Path, out: Path) -> dict[str, float]:
    """Seconds and peak memory (MB, resident) of preparing the text in folder."""
    texts = [f"--{flag}" for flag in ("src", "tgt", "valid-src", "valid-tgt")]
    files = [str(folder / name) for name in ("train.en", "train.de", "valid.en", "valid.de")]
    words = ["prepare", *(word for pair in zip(texts, files) for word in pair), "--drop-duplicates", "--out", str(out)]
    begin = time.monotonic()
    # its own account of its memory: what the system tells its parent (wait4) begins with the parent's own peak
    ended = subprocess.run(calling(run_and_tell_memory, words), stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"fasttfm prepare ended with {ended.returncode}")
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "peak_mb": round(int(ended.stdout.splitlines()[-1]) / (1 << 20)),
    }


def run_and_tell_memory(words: list[str]) -> int:
    """Run the command line `fasttfm WORDS` here, then print the peak memory of this process in bytes."""
    status = run_command(words)
    print(peak_memory())
    return status


def measure(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """One entry a size."""
    result = []
    for pairs in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder), pairs)
            result.append({"pairs": pairs, "words_a_side": WIDTH, **prepare(Path(folder), Path(folder) / "DATA")})
        print(result[-1], flush=True)
    return result


@command.program(
    command.flag("--pairs", type=int, nargs="+", default=[100_000, 1_000_000], help="(default: %(default)s)")
)
def main(args: Any) -> dict[str, Any]:
    return {"measured": measure(args.pairs)}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
