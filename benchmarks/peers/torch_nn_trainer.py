"""A plain trainer for torch.nn's Transformer: the baseline without fasttfm, on the same data for the same time.

    python -m benchmarks.peers.torch_nn_trainer --data DATA --out OUT --minutes 25 [--preset multi30k] < test.src > out

DATA is made by `fasttfm prepare`. Model, batches, optimizer and label smoothing are the preset's; the learning rate
rises over the preset's warm-up and then falls with a cosine to zero at the end of the minutes. torch.nn's decoder has
no cache, so each token recomputes its prefix. Lines on standard input are translated greedily at the end. The log is
OUT/log.jsonl.
"""

import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks import command
from benchmarks.peers import torch_nn
from benchmarks.peers.torch_nn import Step, TorchTransformer
from fasttfm.cli.parser import InRange, Parser
from fasttfm.config.data import DataConfig
from fasttfm.config.presets import preset_section
from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import TokenBatches
from fasttfm.data.prepared import PreparedData
from fasttfm.data.shapes import length_batches
from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.errors import UserError
from fasttfm.models import TransformerConfig
from fasttfm.search.batches import padded
from fasttfm.system.machine import pick_device
from fasttfm.training.precision import autocast_dtype
from fasttfm.translate.translator import one_line

_LOG_EVERY = 50


@torch.no_grad()
def greedy(model: TorchTransformer, sources: Sequence[Sequence[int]], longer: int = 50) -> list[list[int]]:
    """Greedy search, up to `longer` tokens more than the longest source of a batch; sources: ids with EOS."""
    device = model.output.weight.device
    model.eval()
    result: list[list[int]] = [[] for _ in sources]
    for positions in length_batches([len(source) for source in sources], 4096):
        source, lengths = padded([sources[position] for position in positions], device)
        padding = torch.arange(source.shape[1], device=device) >= lengths[:, None]
        memory = model.encoder(model.embed(source), src_key_padding_mask=padding)
        target = torch.full((len(positions), 1), BOS, device=device)
        ended = torch.zeros(len(positions), dtype=torch.bool, device=device)
        for _ in range(source.shape[1] + longer):
            hidden = model.decode(target, memory, padding)
            token = model.output(hidden[:, -1]).argmax(dim=1)
            target = torch.cat([target, token[:, None]], dim=1)
            ended |= token == EOS
            if ended.all():
                break
        for position, ids in zip(positions, target[:, 1:].tolist()):
            result[position] = ids[: ids.index(EOS)] if EOS in ids else ids
    return result


def train(
    data: PreparedData, preset: str, *, began: float, minutes: float, seed: int, log: TextIO, device: torch.device
) -> TorchTransformer:
    """Train a model until `minutes` after `began`; log: a file that gets JSON lines."""
    torch.manual_seed(seed)
    vocabulary = {"vocab_size": len(data.target_tokenizer)}
    config = TransformerConfig(**{**preset_section(preset, "model"), **vocabulary})
    training = TrainingConfig(**preset_section(preset, "training"))
    limits = DataConfig(**preset_section(preset, "data"))
    if config.share_embeddings != "all" or not data.joint or training.update_freq != 1:
        raise UserError(
            f"preset {preset} is not supported: this trainer needs a joint vocabulary, one shared embedding and "
            "update_freq 1, such as multi30k"
        )
    model = TorchTransformer(config).to(device)
    step = Step(model, torch_nn.loss, training, autocast_dtype(training.precision, device))
    batches = TokenBatches(data.train, limits.max_tokens, seed, limits.max_sentence_tokens)
    forever = (batches.batch(indices, epoch) for epoch in itertools.count() for indices in batches.epoch(epoch))
    sums, logged = defaultdict[str, float](float), time.monotonic()
    model.train()
    for done in itertools.count(1):
        progress = (time.monotonic() - began) / (60 * minutes)
        if sums and (progress >= 1 or done % _LOG_EVERY == 1):
            _write(
                log,
                kind="train",
                step=done - 1,
                loss=sums["loss"] / sums["target_tokens"],
                padding=1 - sums["used"] / sums["cells"],
                target_tokens=sums["target_tokens"],
                tokens_per_second=sums["target_tokens"] / (time.monotonic() - logged),
            )
            sums, logged = defaultdict(float), time.monotonic()
        if progress >= 1:
            break
        batch = next(forever)
        lr = training.lr * min(done / training.warmup_updates, (1 + math.cos(math.pi * progress)) / 2)
        sums["loss"] += float(step(batch.to(device), lr)) * batch.target_tokens
        sums["target_tokens"] += batch.target_tokens
        sums["used"] += batch.source_tokens + batch.target_tokens
        sums["cells"] += batch.source.numel() + batch.target_in.numel()
    _write(log, kind="end", step=done - 1, seconds=round(time.monotonic() - began, 2))
    return model


def _write(log: TextIO, **entry: Any) -> None:
    print(json.dumps(entry), file=log, flush=True)
    print(
        *(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in entry.items()),
        file=sys.stderr,
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = Parser(prog="python -m benchmarks.peers.torch_nn_trainer", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder made by fasttfm prepare")
    add("--out", type=Path, required=True, help="folder for weights and log")
    add("--minutes", type=InRange(0.01, 10**6, float), required=True, help="time limit from the start of the command")
    add("--preset", default="multi30k", help="(default: %(default)s)")
    add("--seed", type=int, default=1, help="(default: %(default)s)")
    add("--threads", type=InRange(0, 1024), default=0, help="CPU threads; 0: PyTorch's default")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if available)")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    data, device = PreparedData.open(args.data), pick_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "log.jsonl").open("w") as log:
        model = train(data, args.preset, began=began, minutes=args.minutes, seed=args.seed, log=log, device=device)
        lines = [] if sys.stdin.isatty() else sys.stdin.read().splitlines()
        trained = time.monotonic()
        outputs = greedy(model, [[*data.source_tokenizer.encode(line), EOS] for line in lines])
        _write(log, kind="translate", lines=len(lines), translate_seconds=round(time.monotonic() - trained, 1))
    torch.save(model.state_dict(), args.out / "weights.pt")
    sys.stdout.write("".join(f"{one_line(data.target_tokenizer.decode(ids))}\n" for ids in outputs))
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
