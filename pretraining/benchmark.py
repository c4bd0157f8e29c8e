"""Pre-training for equal minutes, ours beside Hugging Face's Trainer: tokens/s and what the held-out text costs.

    python -m pretraining.benchmark gpt --minutes 5 --text data/lm_text/tinyshakespeare.txt.gz [--rounds 3]
    python -m pretraining.benchmark bert --minutes 5 --text data/lm_text/tinyshakespeare.txt.gz

Prepares the text by `fasttfm lm prepare`, then trains the preset's model on the same tokens with the same batches'
size, optimizer and rate (constant after its warm-up), ours by the command line with a process a core, theirs by
pretraining.huggingface_trainer with a thread a core, which is each one's default; both with bf16 autocast. They
take turns. Tokens/s are those of the second half of the updates. Both models are evaluated by `fasttfm lm evaluate`'s
code on the held-out end of the text, a BERT on tokens hidden in it, the same ones for both: of these, bits per byte of
their text. Appends one line to benchmarks/results/pretraining.jsonl.
"""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from fasttfm.cli.parser import InRange
from fasttfm.config.presets import preset_section
from fasttfm.store.run_log import read_log
from fasttfm.system.machine import pick_device
from fasttfm.system.parsing import parse_json
from fasttfm_pretraining.config.data import MaskingConfig
from fasttfm_pretraining.data.documents import PreparedDocuments, RowBatches
from fasttfm_pretraining.interop.bert import read_pretraining
from fasttfm_pretraining.interop.gpt import read
from fasttfm_pretraining.models.gpt import GPT
from fasttfm_pretraining.models.kinds import read_model
from fasttfm_pretraining.training.language_modelling import TextValidator
from fasttfm_pretraining.training.masked_modelling import MaskedValidator, masked_batches


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
    device = pick_device(None)
    loaded = (read_pretraining(model) if is_theirs else read_model("mlm", model, "last")).to(device)
    hidden = torch.cat([batches.batch(indices).labels for indices in batches.in_order()])
    nats = MaskedValidator(batches, device=device)(loaded).nll * len(hidden)
    return nats / math.log(2) / bytes_of(hidden, PreparedDocuments.open(data))


def bytes_of(tokens: torch.Tensor, data: PreparedDocuments) -> float:
    """Number of bytes of the text that tokens stand for."""
    pieces = [piece.replace("\u2581", " ") for piece in data.tokenizer.pieces()]
    sizes = torch.tensor([1 if piece.startswith("<0x") else len(piece.encode()) for piece in pieces])
    return float(sizes[tokens].sum())


def tokens_per_hidden(data: Path, preset: str) -> float:
    """Tokens of a BERT's rows for each that is hidden."""
    batches = _masked_batches(data, preset, held_out=False)
    lengths = batches.spans.ends - batches.spans.begins
    return float(lengths.sum()) / batches.target_tokens


KINDS = {
    "gpt": Kind("gpt-tiny", ["lm", "train"], bits_per_byte),
    "bert": Kind("bert-tiny", ["mlm", "train", "--objective", "mlm"], masked_bits_per_byte, tokens_per_hidden),
}


_CONSTANT = ("--schedule", "constant", "--max-update", 10**9)
_QUIET = ("--no-tensorboard", "--valid-interval-updates", 0, "--save-interval-updates", 0, "--log-interval", 1)


def ours(kind: str, preset: str, data: Path, out: Path, minutes: float) -> dict[str, Any]:
    """One training by fasttfm, without a pause to validate or save."""
    words = [*KINDS[kind].command, "--preset", preset, "--data", data, "--out", out, *_CONSTANT, *_QUIET]
    command.python("fasttfm", *words, "--max-minutes", minutes)
    updates = [record for record in read_log(out) if record["kind"] == "train"]
    late = updates[len(updates) // 2 :]  # new shapes take time
    seconds = sum(record["target_tokens"] / record["tokens_per_second"] for record in late)
    tokens = KINDS[kind].tokens(data, preset) * sum(record["target_tokens"] for record in late)
    last = updates[-1]
    return {"tokens_per_second": tokens / seconds, "updates": last["step"], "peak_memory": last["peak_memory"]}


def theirs(kind: str, preset: str, data: Path, out: Path, minutes: float) -> dict[str, Any]:
    """One training by Hugging Face's Trainer."""
    words = ["pretraining.huggingface_trainer", kind, "--preset", preset, "--data", data, "--out", out]
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("pretraining.benchmark", __doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain text, or packed; a document each")
    parser.add_argument(
        "--minutes", type=InRange(0.01, 10**6, float), default=5.0, help="of each training (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=InRange(1, 1000), default=3, help="turns of both (default: %(default)s)")
    parser.add_argument("--preset", help="(default: the tiny one of the kind)")
    parser.add_argument("--vocab-size", type=int, default=2000, help="subwords (default: %(default)s)")
    args = parser.parse_args(argv)
    preset = args.preset or KINDS[args.kind].preset
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare = ["fasttfm", "lm", "prepare", "--text", *args.text, "--out", folder / "data"]
        command.python(*prepare, "--vocab-size", args.vocab_size)
        measured = measure(args.kind, preset, folder / "data", folder, args.minutes, args.rounds)
    print(json.dumps(measured, indent=2))
    options = {"vocab_size": args.vocab_size, "minutes": args.minutes}
    text = [path.name for path in args.text]
    command.keep(args.results, "pretraining", kind=args.kind, preset=preset, text=text, **options, measured=measured)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
