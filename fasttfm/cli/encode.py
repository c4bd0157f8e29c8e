"""Reads lines of text and writes their subwords, or token numbers, separated by spaces."""

import argparse
import sys
from typing import TYPE_CHECKING

from fasttfm.cli.paths import INPUT

if TYPE_CHECKING:
    from fasttfm.data.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=INPUT, metavar="DIR", help="model directory, data directory or SentencePiece model"
    )
    parser.add_argument(
        "--target", action="store_true", help="use the target's vocabulary, where each side has its own"
    )
    parser.add_argument("--ids", action="store_true", help="token numbers in place of subwords")


def load_tokenizer(args: argparse.Namespace) -> "Tokenizer":
    """The tokenizer that encode and decode are asked for."""
    from fasttfm.data.tokenizer import Tokenizer
    from fasttfm.data.tokenizer_files import load_tokenizers

    return load_tokenizers(args.model)[args.target] if args.model.is_dir() else Tokenizer.load(args.model)


def run(args: argparse.Namespace) -> None:
    """Encode line by line, so that it may stand in a pipe."""
    from fasttfm.data.corpus import decode_lines

    tokenizer = load_tokenizer(args)
    for line in decode_lines(sys.stdin.buffer, "standard input"):
        ids = tokenizer.encode(line)
        sys.stdout.write(" ".join(map(str, ids) if args.ids else tokenizer.pieces(ids)) + "\n")
