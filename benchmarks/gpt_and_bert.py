"""GPT beside BERT: the same text, shape, minutes and fine-tuning; what each of them can tell.

    python -m benchmarks.gpt_and_bert --text data/lm_text/tinyshakespeare.txt.gz data/lm_text/plato_republic.txt.gz

Both presets are pre-trained for equal minutes on the same prepared text, GPT on the next token, BERT on hidden ones.
Then, on what was held out of every text:

bits per byte     of the whole text by GPT; BERT gives a text no probability
hidden tokens     the same ones for both: BERT sees the rest of the row on both sides, GPT what stands before
lines             which text a line is from, after `fasttfm finetune classify` on some others, from the pre-trained
                  weights and from fresh ones, with one recipe

Prints the table and appends one line to benchmarks/results/gpt-and-bert.jsonl. Three minutes of pre-training and four
fine-tunings take about six minutes on two cores.
"""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from fasttfm.blocks.loss import logits
from fasttfm.config.data import MaskingConfig
from fasttfm.data.corpus import read_lines
from fasttfm.data.documents import PreparedDocuments
from fasttfm.data.masked_rows import MaskedBatches
from fasttfm.data.pairs import read_pairs
from fasttfm.errors import UserError
from fasttfm.models.encoders import read_encoder
from fasttfm.models.gpt import GPT
from fasttfm.training.masked_modelling import masked_batches
from fasttfm.training.pretraining import evaluate
from fasttfm.training.task_prediction import FineTuned

MODELS = {
    "GPT": ("lm", "train", "--preset", "gpt-tiny"),
    "BERT": ("mlm", "train", "--preset", "bert-tiny", "--objective", "mlm"),
}
"""The words that train each."""
SHAPE = ("--row-length", 128, "--max-tokens", 4096)
"""What both are given otherwise than their presets have it."""
FINETUNING = ("--row-length", 64, "--max-tokens", 512, "--max-epoch", 8)
LINE = 8
"""Words of a line."""
LINES = {"train": 120, "valid": 600}
"""Lines to learn from, few so that pre-training may matter, and to tell, of all texts together."""
HELD_OUT = 0.04
"""The last share of a text, of which neither the pre-training nor the lines to learn from have seen anything."""


def pretrain(name: str, data: Path, out: Path, minutes: float) -> dict[str, Any]:
    """One of MODELS, trained into `out`; what its log says."""
    trained = command.train(*MODELS[name], "--data", data, *SHAPE, *command.for_minutes(minutes), out=out)
    return {
        "updates": trained[-1]["step"],
        "predicted_tokens": sum(record["target_tokens"] for record in trained),
        "parameters": sum(parameter.numel() for parameter in read(name, out).parameters()),
    }


def read(name: str, folder: Path) -> Any:
    """The model as it was when its minutes were over."""
    return GPT.from_pretrained(folder, "last") if name == "GPT" else read_encoder(folder, "last")


# ------------------------------------------------------------------------------------------------- hidden tokens


def held_out_rows(data: PreparedDocuments) -> MaskedBatches:
    """Rows of the held-out text with 15% of their tokens hidden, always the same."""
    config = MaskingConfig(objective="mlm", row_length=int(SHAPE[1]), max_tokens=int(SHAPE[3]))
    return masked_batches(config, data.valid, data.tokenizer)


@torch.no_grad()
def cloze(name: str, model: Any, data: PreparedDocuments) -> dict[str, float]:
    """Share of the hidden tokens that is told right, and the bits of these over their bytes.

    The first token of a row's text is left out: GPT has nothing before it.
    """
    rows = held_out_rows(data)
    said = bert_logits if name == "BERT" else gpt_logits
    right = count = 0
    nats, hidden = 0.0, []
    for indices in rows.in_order():
        batch = rows.batch(indices)
        kept = batch.positions % batch.tokens.shape[1] >= 2
        labels = batch.labels[kept]
        scores = said(model, batch, batch.positions[kept]).float()  # (M, V)
        nats += float(torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))
        right += int((scores.argmax(-1) == labels).sum())
        count += len(labels)
        hidden.append(labels)
    bits = nats / math.log(2) / bytes_of(torch.cat(hidden), data)
    return {"hidden_right": round(right / count, 4), "hidden_bits_per_byte": round(bits, 4), "hidden_tokens": count}


def bytes_of(tokens: torch.Tensor, data: PreparedDocuments) -> float:
    """Number of bytes of the text that tokens stand for."""
    pieces = [piece.replace("\u2581", " ") for piece in data.tokenizer.pieces()]
    sizes = torch.tensor([1 if piece.startswith("<0x") else len(piece.encode()) for piece in pieces])
    return float(sizes[tokens].sum())


def bert_logits(model: Any, batch: Any, positions: torch.Tensor) -> torch.Tensor:
    """(M, V) at the positions, of both sides with what is hidden."""
    return model(batch.tokens, batch.segments, batch.lengths, positions).masked


def gpt_logits(model: GPT, batch: Any, positions: torch.Tensor) -> torch.Tensor:
    """(M, V) for the tokens at the positions, of all that stands before them in the row, which is not hidden."""
    tokens = batch.tokens.clone()
    tokens.view(-1)[batch.positions] = batch.labels
    width = tokens.shape[1]
    text = model.hidden(tokens[:, 1:])  # (B, L - 1, d): without [CLS], which GPT has never seen
    return logits(text[positions // width, positions % width - 2], model.output)


# --------------------------------------------------------------------------------------------------------- lines


def write_lines(texts: Sequence[Path], folder: Path) -> tuple[Path, Path]:
    """Two CSV files of lines and the text they are from: to learn from, and of the held-out ends.

    Raises UserError for fewer than two texts, and for one that is too short.
    """
    if len(texts) < 2:
        raise UserError("--text: at least two files are needed, whose lines are told from one another")
    parts: dict[str, list[tuple[str, str]]] = {"train": [], "valid": []}
    for path in texts:
        words = " ".join(read_lines(path)).split()
        begin = round(len(words) * (1 - HELD_OUT))
        for part, some in (("train", words[:begin]), ("valid", words[begin:])):
            lines = [" ".join(some[n : n + LINE]) for n in range(0, len(some) - LINE + 1, LINE)]
            share = LINES[part] // len(texts)
            if len(lines) < share:
                raise UserError(f"{path}: its {part} part has {len(lines)} lines of {LINE} words, {share} are needed")
            parts[part] += [(lines[n * len(lines) // share], path.name) for n in range(share)]
    for part, rows in parts.items():
        with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    return folder / "train.csv", folder / "valid.csv"


def told_right(flag: str, body: Path, files: tuple[Path, Path], out: Path) -> float:
    """Share of the held-out lines whose text is told after fine-tuning; flag: --init-from or --like."""
    train, valid = files
    command.train("finetune", "classify", flag, body, "--train", train, "--valid", valid, *FINETUNING, out=out)
    labels = FineTuned.load(out, "last", torch.device("cpu")).labels_of(valid, None)
    wanted = [example.label for example in read_pairs(valid)]
    return round(sum(mine == label for mine, label in zip(labels, wanted)) / len(wanted), 4)


# --------------------------------------------------------------------------------------------------------- table


def table(measured: Sequence[dict[str, Any]], minutes: float) -> str:
    """The lecture's table with the measured rows below, in Markdown; measured: GPT's and BERT's."""
    gpt, bert = measured
    rows = [
        ("", "GPT", "BERT"),
        ("---", "---", "---"),
        ("a token sees", "the tokens before it", "both sides"),
        ("paper: words of text", "800M", "2,500M"),
        ("paper: words of a batch", "32,000", "128,000"),
        ("paper: rate of fine-tuning", "5e-5", "a rate per task"),
        ("parameters", f"{gpt['parameters']:,}", f"{bert['parameters']:,}"),
        (f"tokens predicted in {minutes:g} minutes", f"{gpt['predicted_tokens']:,}", f"{bert['predicted_tokens']:,}"),
        ("held-out bits per byte", f"{gpt['bits_per_byte']:.3f}", "gives none"),
        ("hidden tokens told right", f"{gpt['hidden_right']:.1%}", f"{bert['hidden_right']:.1%}"),
        ("bits per byte of hidden tokens", f"{gpt['hidden_bits_per_byte']:.3f}", f"{bert['hidden_bits_per_byte']:.3f}"),
        ("lines told right, fine-tuned", f"{gpt['lines_right']:.1%}", f"{bert['lines_right']:.1%}"),
        ("lines told right, fresh weights", f"{gpt['lines_right_fresh']:.1%}", f"{bert['lines_right_fresh']:.1%}"),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measure(texts: Sequence[Path], folder: Path, minutes: float, vocab_size: int) -> list[dict[str, Any]]:
    """A row for each of both."""
    data = folder / "data"
    command.python("fasttfm", "mlm", "prepare", "--text", *texts, "--out", data, "--vocab-size", vocab_size)
    prepared, files = PreparedDocuments.open(data), write_lines(texts, folder)
    measured = []
    for name in MODELS:
        body = folder / name
        row = {"model": name, **pretrain(name, data, body, minutes)}
        model = read(name, body)
        row |= cloze(name, model, prepared)
        if name == "GPT":
            row["bits_per_byte"] = round(evaluate(model, prepared.tokenizer, body, data=data).bits_per_byte, 4)
        row["lines_right"] = told_right("--init-from", body, files, folder / f"{name}-tuned")
        row["lines_right_fresh"] = told_right("--like", body, files, folder / f"{name}-fresh")
        print(json.dumps(row), flush=True)
        measured.append(row)
    return measured


@command.program(command.TEXTS, command.minutes(1.5, "pre-training"), command.vocab_size(2000))
def main(args: Any) -> dict[str, Any]:
    measured = measure(args.text, args.folder, args.minutes, args.vocab_size)
    print(table(measured, args.minutes))
    return {"measured": measured}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
