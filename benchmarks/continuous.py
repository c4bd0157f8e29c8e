"""Translation with sentences that join a running search, beside batches of like length that nobody joins.

    python -m benchmarks.continuous MODEL --text in.en --precision bf16

Both translate the same lines in turns, in one process of one thread, and must find the same to the last bit. Tokens are
those of the outputs, end-of-sentence counted. Appends one line to benchmarks/results/continuous.jsonl.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from benchmarks import command
from fasttfm.data.corpus import read_lines
from fasttfm.data.tokenizer import EOS
from fasttfm.decoding import Hypothesis, Translator, search, search_ids


def measure(translator: Translator, lines: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Way -> its median seconds and tokens a second; SystemExit where the two find anything else."""
    encode = translator.source_tokenizer.encode
    sources = [[*translator.source_tokenizer.prefix, *encode(line), EOS] for line in lines]

    def continuous() -> list[list[Hypothesis]]:
        return search_ids(translator.model, sources, translator.config)

    def batches() -> list[list[Hypothesis]]:
        with mock.patch.object(search, "can_continue", return_value=False):
            return continuous()

    seconds, outputs = command.in_turns({"continuous": continuous, "batches": batches}, rounds)
    if outputs["continuous"] != outputs["batches"]:
        raise SystemExit("the two did not find the same")
    tokens = sum(len(hypotheses[0].tokens) + 1 for hypotheses in outputs["batches"])
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    return {
        way: {"seconds": round(each, 3), "target_tokens_per_second": round(tokens / each, 1)}
        for way, each in medians.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("continuous", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="model directory")
    parser.add_argument("--text", type=Path, required=True, help="source sentences, one a line")
    parser.add_argument("--lines", type=int, default=400, help="that are translated (default: %(default)s)")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16", "int8"), help="as of fasttfm translate")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both (default: %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = [line for line in read_lines(args.text) if line.strip()][: args.lines]
    translator = Translator.from_directory(args.model, device="cpu", precision=args.precision, workers=1)
    measured = measure(translator, lines, args.rounds)
    print(json.dumps(measured), flush=True)
    precision = args.precision or "that of the model"
    fields = {"text": args.text.name, "lines": len(lines), "precision": precision, "measured": [measured]}
    command.keep(args.results, "continuous", **fields)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
