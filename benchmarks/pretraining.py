"""Pre-training for equal minutes, ours beside Hugging Face's Trainer: tokens/s and what the held-out text costs.

    python -m benchmarks.pretraining gpt --minutes 5 --text data/lm_text/tinyshakespeare.txt.gz [--rounds 3]
    python -m benchmarks.pretraining bert --minutes 5 --text data/lm_text/tinyshakespeare.txt.gz

Prepares the text by `fasttfm lm prepare`, then trains the preset's model on the same tokens with the same batches'
size, optimizer and rate (constant after its warm-up), ours by the command line with a process a core, theirs by
benchmarks.peers.huggingface_trainer with a thread a core, which is each one's default; both with bf16 autocast. They
take turns. Tokens/s are those of the second half of the updates. Both models are evaluated by `fasttfm lm evaluate`'s
code on the held-out end of the text, a BERT on tokens hidden in it, the same ones for both: of these, bits per byte of
their text. Appends one line to benchmarks/results/pretraining.jsonl.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from benchmarks.gpt_and_bert import bytes_of
from fasttfm.config.data import MaskingConfig
from fasttfm.data.documents import PreparedDocuments, RowBatches
from fasttfm.interop.bert import read_pretraining
from fasttfm.interop.gpt import read
from fasttfm.models.encoders import read_encoder
from fasttfm.models.gpt import GPT
from fasttfm.parsing import parse_json
from fasttfm.presets import preset_section
from fasttfm.training.masked_modelling import MaskedValidator, masked_batches
from fasttfm.training.pretraining import TextValidator


@dataclass(frozen=True)
class Kind:
    """A kind of model to be pre-trained."""

    preset: str
    command: list[str]
    """Of ours, up to its flags."""
    evaluate: Callable[[Path, Path, bool], float]
    """(data, model, whether it is of Hugging Face) -> held-out bits per byte."""
    tokens: Callable[[Path, str], float] = lambda data, preset: 1.0
    """(data, preset) -> tokens that are read for each that is predicted."""


def bits_per_byte(data: Path, model: Path, is_theirs: bool) -> float:
    """Bits per byte of a GPT on what the data hold out."""
    prepared = PreparedDocuments.open(data)
    loaded = read(model) if is_theirs else GPT.from_pretrained(model, "last")
    length = loaded.config.max_length
    rows = RowBatches(prepared.valid, length, 8 * length)
    return TextValidator(rows, device=next(loaded.parameters()).device)(loaded).bits_per_byte


def _masked_batches(data: Path, preset: str, *, held_out: bool) -> Any:
    """A BERT's batches without pairs."""
    prepared = PreparedDocuments.open(data)
    config = MaskingConfig(**{**preset_section(preset, "data", "bert"), "objective": "mlm"})
    return masked_batches(config, prepared.valid if held_out else prepared.train, prepared.tokenizer)


def masked_bits_per_byte(data: Path, model: Path, is_theirs: bool) -> float:
    """Bits of the tokens that are hidden in what the data hold out, over the bytes of these."""
    batches = _masked_batches(data, KINDS["bert"].preset, held_out=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = (read_pretraining(model) if is_theirs else read_encoder(model, "last")).to(device)
    hidden = torch.cat([batches.batch(indices).labels for indices in batches.in_order()])
    nats = MaskedValidator(batches, device=device)(loaded).nll * len(hidden)
    return nats / math.log(2) / bytes_of(hidden, PreparedDocuments.open(data))


def tokens_per_hidden(data: Path, preset: str) -> float:
    """Tokens of a BERT's rows for each that is hidden."""
    batches = _masked_batches(data, preset, held_out=False)
    lengths = batches.spans.ends - batches.spans.begins
    return float(lengths.sum()) / batches.target_tokens


KINDS = {
    "gpt": Kind("gpt-tiny", ["lm", "train"], bits_per_byte),
    "bert": Kind("bert-tiny", ["mlm", "train", "--objective", "mlm"], masked_bits_per_byte, tokens_per_hidden),
}


def ours(kind: str, preset: str, data: Path, out: Path, minutes: float) -> dict[str, Any]:
    """One training by fasttfm."""
    words = [*KINDS[kind].command, "--preset", preset, "--data", data, "--schedule", "constant", "--max-update", 10**9]
    run = command.timed_training(*words, out=out, minutes=minutes)
    return {**run, "tokens_per_second": KINDS[kind].tokens(data, preset) * run["tokens_per_second"]}


def theirs(kind: str, preset: str, data: Path, out: Path, minutes: float) -> dict[str, Any]:
    """One training by Hugging Face's Trainer."""
    words = ["benchmarks.peers.huggingface_trainer", kind, "--preset", preset, "--data", data, "--out", out]
    return parse_json(command.python(*words, "--minutes", minutes).splitlines()[-1])


def measure(kind: str, preset: str, data: Path, folder: Path, minutes: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each of both: the median of the rounds, and each round's numbers."""
    runs: dict[str, list[dict[str, Any]]] = {"fasttfm": [], "Hugging Face Trainer": []}
    for turn in range(rounds):
        for provider, train in (("fasttfm", ours), ("Hugging Face Trainer", theirs)):
            out = folder / f"{provider.split()[0]}-{turn}"
            run = train(kind, preset, data, out, minutes)
            run["bits_per_byte"] = KINDS[kind].evaluate(data, out, provider != "fasttfm")
            print(
                f"{provider}: {run['tokens_per_second']:,.0f} tokens/s, {run['bits_per_byte']:.3f} bits per byte",
                flush=True,
            )
            runs[provider].append(run)
    return [
        {
            "provider": provider,
            "tokens_per_second": round(statistics.median(run["tokens_per_second"] for run in each)),
            "bits_per_byte": round(statistics.median(run["bits_per_byte"] for run in each), 4),
            "rounds": each,
        }
        for provider, each in runs.items()
    ]


@command.program(
    command.flag("kind", choices=sorted(KINDS)),
    command.TEXTS,
    command.minutes(5.0, "training"),
    command.rounds(3, "both"),
    command.flag("--preset", help="(default: the tiny one of the kind)"),
    command.vocab_size(2000),
)
def main(args: Any) -> dict[str, Any]:
    args.preset = args.preset or KINDS[args.kind].preset
    data = args.folder / "data"
    prepare = ["fasttfm", "lm", "prepare", "--text", *args.text, "--out", data]
    command.python(*prepare, "--vocab-size", args.vocab_size)
    measured = measure(args.kind, args.preset, data, args.folder, args.minutes, args.rounds)
    print(json.dumps(measured, indent=2))
    return {"measured": measured}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
