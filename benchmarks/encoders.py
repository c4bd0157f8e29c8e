"""Effects of ALBERT's and ELECTRA's changes to BERT, on this machine: sharing by sharing, and at equal compute.

    python -m benchmarks.encoders albert --text data/lm_text/tinyshakespeare.txt.gz data/lm_text/plato_republic.txt.gz
    python -m benchmarks.encoders electra --text data/lm_text/tinyshakespeare.txt.gz data/lm_text/plato_republic.txt.gz

albert     the four ways of sharing (and BERT's wide embeddings): parameters, the held-out loss of masked tokens after
           as many updates on the same rows, tokens/s
electra    masked language modelling and ELECTRA for equal minutes of the same threads. Each model is stopped at times
           and asked what the mean hidden state of a line knows: ridge regression on frozen states tells which text a
           line of 16 tokens is from, and the figure shows it by minutes of training; fresh weights are the first point

The shapes are those of bert-tiny, batches of 1,024 tokens; rows and probes are drawn alike. Appends a line to
benchmarks/results/encoders.jsonl; electra draws docs/images/electra-curve.png.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import command
from fasttfm.config import build_run, gather
from fasttfm.data.documents import Documents, PreparedDocuments
from fasttfm.data.masked_rows import Spans
from fasttfm.data.masking_vocabulary import masking_vocabulary
from fasttfm.data.prepare_documents import DocumentOptions, prepare_documents
from fasttfm.drawing import drawing
from fasttfm.errors import UserError
from fasttfm.models.bert import Bert
from fasttfm.models.electra import Electra
from fasttfm.models.kinds import model_class
from fasttfm.training.masked_modelling import MaskedValidator, masked_batches
from fasttfm.training.updates import AUTOCAST, Updates

CPU = torch.device("cpu")
RECIPE = {"schedule": "constant", "warmup_updates": 20, "max_tokens": 1024, "dropout": 0.0}
"""What trainings of a minute or two have otherwise than the presets."""
SHARING = (
    ("albert, layers not shared", {"share": "none"}),
    ("albert, attention shared", {"share": "attention"}),
    ("albert, feed-forward shared", {"share": "ffn"}),
    ("albert, all shared", {"share": "all"}),
    ("bert: wide embeddings, not shared", {"share": "none", "embedding_size": None}),
)
POINTS = 6
"""Probes of a training of ELECTRA's comparison, after that of fresh weights."""
LINE = 16
"""Tokens of a line of the probe."""
LINES = 1200
"""Lines of the probe, half of them to fit."""


def prepared(texts: Sequence[Path], folder: Path, vocab_size: int) -> PreparedDocuments:
    """Documents of the texts, each of them one."""
    prepare_documents(texts, folder, DocumentOptions(vocab_size=vocab_size), say=lambda line: None)
    return PreparedDocuments.open(folder)


class Run:
    """One training of a preset on prepared documents, by this process."""

    def __init__(self, data: PreparedDocuments, kind: str, preset: str, **changes: Any) -> None:
        objective = "electra" if kind == "electra" else "mlm"
        values = gather(preset, overrides={**RECIPE, "objective": objective, **changes}, kind=kind)
        if kind != "electra":
            values["model"]["sentence_head"] = False
        config = build_run(values, {"vocab_size": len(data.tokenizer)})
        torch.manual_seed(config.training.seed)
        self.model = model_class(kind)(config.model)
        batches = masked_batches(config.data, data.train, data.tokenizer, config.training.seed)
        self.updates = Updates(self.model.train(), batches, config.training, CPU)
        held_out = masked_batches(config.data, data.valid, data.tokenizer)
        self.validator = MaskedValidator(held_out, device=CPU, autocast=AUTOCAST[config.training.precision])
        self.tokens_per_hidden = float(np.sum(batches.spans.ends - batches.spans.begins)) / batches.target_tokens

    @property
    def body(self) -> Bert:
        """Return the part that would be fine-tuned."""
        return self.model.discriminator if isinstance(self.model, Electra) else self.model.body

    def tokens(self) -> float:
        """Number of tokens that were read so far."""
        return self.tokens_per_hidden * self.updates.sums.target_tokens


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ------------------------------------------------------------------------------------------------------------ ALBERT


def albert(data: PreparedDocuments, updates: int) -> list[dict[str, Any]]:
    """A row for each way of sharing."""
    rows = []
    for name, changes in SHARING:
        run = Run(data, "albert", "albert-tiny", activation="gelu", **changes)
        for _ in range(updates):
            run.updates.perform()
        score = run.validator(run.model)
        rows.append(
            {
                "model": name,
                "parameters": parameters(run.body),
                "updates": updates,
                "masked_nats": round(score.nll, 4),
                "masked_accuracy": round(score.masked_accuracy, 4),
                "tokens_per_second": round(run.tokens() / run.updates.sums.seconds),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


# ------------------------------------------------------------------------------------------------------------ ELECTRA


class Probe:
    """Classifier of which text a line is from, by the mean of frozen hidden states."""

    def __init__(self, data: PreparedDocuments) -> None:
        """Raises UserError for fewer than two texts."""
        documents: Documents = data.valid
        if len(documents) < 2:
            raise UserError("--text: at least two files are needed, which the probe tells from one another")
        vocabulary = masking_vocabulary(data.tokenizer)
        spans = Spans.of(documents, LINE)
        whole = np.flatnonzero(spans.ends - spans.begins == LINE)
        chosen = np.sort(np.random.default_rng(0).permutation(whole)[:LINES])
        lines = [documents.read(int(spans.begins[number]), int(spans.ends[number])) for number in chosen]
        tokens = [[vocabulary.begin, *line, vocabulary.end] for line in lines]
        self.tokens, self.labels = torch.tensor(tokens), torch.from_numpy(spans.documents[chosen])
        self.is_fitted = torch.from_numpy(np.random.default_rng(1).permutation(len(chosen)) < len(chosen) // 2)

    @torch.no_grad()
    def __call__(self, body: Bert) -> float:
        """Accuracy on the lines that were not fitted."""
        training = body.training
        body.eval()
        states = torch.cat([body(part).mean(dim=1) for part in self.tokens.split(100)]).double()
        body.train(training)
        return ridge_accuracy(states, self.labels, self.is_fitted)


def ridge_accuracy(states: Tensor, labels: Tensor, is_fitted: Tensor) -> float:
    """Accuracy of ridge regression on one-hot labels; states (N, d) float64, labels (N,), is_fitted (N,) bool."""
    fitted = states[is_fitted]
    scaled = (states - fitted.mean(0)) / fitted.std(0).clamp_min(1e-6)
    x = torch.cat([scaled, torch.ones_like(scaled[:, :1])], dim=1)
    wanted = torch.nn.functional.one_hot(labels).double()
    gram = x[is_fitted].t() @ x[is_fitted] + torch.eye(x.shape[1], dtype=x.dtype) * 0.1 * len(fitted) ** 0.5
    weights = torch.linalg.solve(gram, x[is_fitted].t() @ wanted[is_fitted])
    right = (x[~is_fitted] @ weights).argmax(1) == labels[~is_fitted]
    return float(right.double().mean())


def electra(data: PreparedDocuments, minutes: float) -> dict[str, list[dict[str, Any]]]:
    """The points of the curve of both; seconds are those of training alone."""
    probe = Probe(data)
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, kind, preset in (("masked language model", "bert", "bert-tiny"), ("ELECTRA", "electra", "electra-tiny")):
        run, seconds = Run(data, kind, preset), 0.0
        points = curves[name] = [{"seconds": 0.0, "updates": 0, "probe": round(probe(run.body), 4)}]
        for number in range(1, POINTS + 1):
            while seconds < 60 * minutes * number / POINTS:
                started = time.perf_counter()
                run.updates.perform()
                seconds += time.perf_counter() - started
            points.append(
                {
                    "seconds": round(seconds, 2),
                    "updates": run.updates.position.step,
                    "tokens": round(run.tokens()),
                    "parameters": parameters(run.body),
                    "probe": round(probe(run.body), 4),
                    **{key: round(value, 4) for key, value in run.validator(run.model).record().items()},
                }
            )
            print(name, json.dumps(points[-1]), flush=True)
    return curves


def draw(curves: dict[str, list[dict[str, Any]]], target: Path) -> Path:
    """The probe by minutes of training."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with drawing(figsize=(6.4, 4.4), dpi=110, layout="constrained") as figure:
        panel = figure.subplots()
        for name, points in curves.items():
            panel.plot([p["seconds"] / 60 for p in points], [p["probe"] for p in points], "o-", ms=3, label=name)
        panel.set_xlabel("minutes of training on the same threads")
        panel.set_ylabel("lines whose text is told right")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
        figure.savefig(target, format="png")
    return target


@command.program(
    command.flag("comparison", choices=("albert", "electra")),
    command.TEXTS,
    command.flag("--updates", type=int, default=120, help="of each row of albert (default: %(default)s)"),
    command.minutes(1.5, "side of electra"),
    command.vocab_size(2000),
    command.IMAGES,
)
def main(args: Any) -> dict[str, Any]:
    data = prepared(args.text, args.folder / "data", args.vocab_size)
    threads = {"threads": torch.get_num_threads()}
    if args.comparison == "albert":
        return threads | {"measured": albert(data, args.updates)}
    curves = electra(data, args.minutes)
    print(draw(curves, args.images / "electra-curve.png"))
    return threads | {"runs": curves}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
