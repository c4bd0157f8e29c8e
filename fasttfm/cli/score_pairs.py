"""Prints the natural logarithm of the probability that the model gives each translation, end-of-sentence included. One
line for each pair; for reranking and filtering.
"""

import argparse
import itertools
import json
import sys

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import add_device, add_model, add_precision
from fasttfm.cli.paths import INPUT_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--src", type=INPUT_FILE, required=True, help="source text, plain or gzip")
    parser.add_argument(
        "--tgt", type=INPUT_FILE, required=True, help="translations, one for each source line, plain or gzip"
    )
    add_device(parser)
    add_precision(parser)
    add_output_flags(parser, lines="its score")


def run(args: argparse.Namespace) -> None:
    """Score pair after pair, a buffer of lines at a time."""
    from fasttfm.data.corpus import ParallelText
    from fasttfm.decoding.translator import Translator

    translator = Translator.from_directory(args.model, args.checkpoint, device=args.device, precision=args.precision)
    pairs = iter(ParallelText([args.src], [args.tgt]))
    output, number = Output.of(args, "score-pairs"), 0
    with output.bar(unit=" pairs") as bar:
        while buffer := list(itertools.islice(pairs, translator.config.buffer_size)):
            for score in translator.score([pair.source for pair in buffer], [pair.target for pair in buffer]):
                print(json.dumps({"line": number, "score": round(score, 6)}) if args.json else f"{score:.6f}")
                number += 1
            sys.stdout.flush()
            bar.update(len(buffer))
