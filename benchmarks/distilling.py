"""DistilBERT's and TinyBERT's students beside their teacher, and beside the same shape without a teacher.

    python -m benchmarks.distilling --text data/lm_text/plato_republic.txt.gz [--minutes 0.6]

Pre-trains `bert-tiny` on hidden tokens for twice the minutes, distils two students of it by `fasttfm distill bert` and
trains the first one's shape without a teacher, for the minutes each, at equal rows and batches. All are scored on the
same hidden tokens of the held-out text. Appends one line to benchmarks/results/distilling.jsonl. About four minutes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from benchmarks.gpt_and_bert import held_out_rows
from fasttfm.data.documents import PreparedDocuments
from fasttfm.models.encoders import read_encoder
from fasttfm.training.distillation import STUDENT
from fasttfm.training.masked_modelling import MaskedValidator

TEACHER = ("mlm", "train", "--preset", "bert-tiny", "--objective", "mlm")
HALF, NARROW = ("--layers", 2), ("--layers", 2, "--d-model", 64, "--d-ff", 256)


def trained(words: Sequence[object], data: Path, out: Path, minutes: float) -> int:
    """Run a training for so long; returns its updates."""
    return command.train(*words, "--data", data, *command.for_minutes(minutes), out=out)[-1]["step"]


def scored(name: str, folder: Path, checkpoint: str, data: PreparedDocuments, **facts: Any) -> dict[str, Any]:
    """A row: parameters without the pooler, which hidden tokens do not need, and what hidden ones cost."""
    model = read_encoder(folder, checkpoint)
    score = MaskedValidator(held_out_rows(data), device=torch.device("cpu"))(model)
    row = {
        "model": name,
        "parameters": sum(each.numel() for name, each in model.named_parameters() if "pooler" not in name),
        "masked_nats": round(score.nll, 4),
        "masked_accuracy": round(score.masked_accuracy, 4),
        **facts,
    }
    print(json.dumps(row), flush=True)
    return row


def measure(texts: Sequence[Path], folder: Path, minutes: float, vocab_size: int) -> list[dict[str, Any]]:
    """Rows of the teacher, its students, and the first one's shape without a teacher."""
    data, teacher = folder / "data", folder / "teacher"
    command.python("fasttfm", "mlm", "prepare", "--text", *texts, "--out", data, "--vocab-size", vocab_size)
    prepared = PreparedDocuments.open(data)
    updates = trained(TEACHER, data, teacher, 2 * minutes)
    measured = [scored("teacher", teacher, "last", prepared, updates=updates, minutes=2 * minutes)]
    for preset, shape in (("distilbert", HALF), ("tinybert", NARROW)):
        out = folder / preset
        updates = trained(("distill", "bert", teacher, "--preset", preset, *shape), data, out, minutes)
        measured.append(scored(f"student, {preset}", out / STUDENT, "best", prepared, updates=updates, minutes=minutes))
    alone = folder / "alone"
    updates = trained((*TEACHER, *HALF), data, alone, minutes)
    measured.append(scored("no teacher, distilbert's shape", alone, "last", prepared, updates=updates, minutes=minutes))
    return measured


@command.program(command.TEXTS, command.minutes(0.6, "student"), command.vocab_size(2000))
def main(args: Any) -> dict[str, Any]:
    return {"measured": measure(args.text, args.folder, args.minutes, args.vocab_size)}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
