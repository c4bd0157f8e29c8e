"""Worth of pre-training: answers of a fine-tuned BERT beside those of the same model with fresh weights.

    python -m benchmarks.finetuning --text data/lm_text/wikitext2.txt.gz --qa data/qa [--minutes 2] [--epochs 2]

Prepares the text by `fasttfm mlm prepare`, pre-trains the preset's model on its masked tokens for so many minutes, then
fine-tunes it on SQuAD questions by `fasttfm finetune squad`, once from these weights (--init-from) and once from fresh
ones (--like), with the same data, recipe and number of updates, and scores both by the official rules on held-out
articles. --body takes a model that is pre-trained already. Appends one line to benchmarks/results/finetuning.jsonl.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from fasttfm.errors import UserError
from fasttfm.parsing import parse_json

_TRAIN, _VALID = "squad1_sample_train.json.gz", "squad1_sample_valid.json.gz"


def pretrain(texts: Sequence[Path], folder: Path, preset: str, vocab_size: int, minutes: float) -> Path:
    """A model directory that has learnt so long from masked tokens of texts."""
    data, out = folder / "text", folder / "body"
    command.python("fasttfm", "mlm", "prepare", "--text", *texts, "--out", data, "--vocab-size", vocab_size)
    task = ("mlm", "train", "--preset", preset, "--data", data, "--objective", "mlm", "--row-length", 256)
    command.train(*task, *command.for_minutes(minutes), out=out)
    return out


def finetune(flag: str, body: Path, qa: Path, folder: Path, epochs: int) -> dict[str, Any]:
    """The score of one fine-tuning; flag: --init-from or --like."""
    out, predictions = folder / flag.strip("-"), folder / f"{flag.strip('-')}.json"
    started = time.perf_counter()
    task = ("finetune", "squad", flag, body, "--train", qa / _TRAIN, "--valid", qa / _VALID, "--max-epoch", epochs)
    last = command.train(*task, out=out)[-1]
    seconds = time.perf_counter() - started
    command.python("fasttfm", "finetune", "predict", out, qa / _VALID, "--out", predictions, "--checkpoint", "last")
    scores = parse_json(command.python("fasttfm", "finetune", "evaluate", predictions, qa / _VALID, "--json"))
    del scores["command"]
    return {**scores, "seconds": round(seconds, 1), "updates": last["step"], "train_nll": last["nll"]}


@command.program(
    command.flag("--text", type=Path, nargs="+", default=[], help="text to pre-train on, plain or packed"),
    command.flag("--body", type=Path, help="a pre-trained model directory in place of --text"),
    command.flag("--qa", type=Path, required=True, help=f"folder with {_TRAIN} and {_VALID}"),
    command.minutes(2.0, "pre-training"),
    command.flag("--epochs", type=int, default=2, help="of fine-tuning (default: %(default)s)"),
    command.flag("--preset", default="bert-tiny", help="of the model (default: %(default)s)"),
    command.vocab_size(4000),
)
def main(args: Any) -> dict[str, Any]:
    if bool(args.text) == (args.body is not None):
        raise UserError("give --text FILE… or --body MODEL, one of them: what the fine-tuned model has learnt before")
    for name in (_TRAIN, _VALID):
        if not (args.qa / name).is_file():
            raise UserError(f"--qa {args.qa} has no {name}")
    body = args.body or pretrain(args.text, args.folder, args.preset, args.vocab_size, args.minutes)
    measured = []
    for name, flag in (("pre-trained", "--init-from"), ("fresh", "--like")):
        row = {"weights": name, **finetune(flag, body, args.qa, args.folder, args.epochs)}
        print(f"{name} weights: F1 {row['f1']:.2f}, exact match {row['exact']:.2f}", flush=True)
        measured.append(row)
    return {"measured": measured} | ({} if args.text else {"minutes": None, "vocab_size": None})


if __name__ == "__main__":
    raise SystemExit(command.run(main))
