"""Reads lines of text and writes their subwords, or token ids, separated by spaces. --decode does the reverse."""

import argparse
import sys

from fasttfm.cli.paths import INPUT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=INPUT, metavar="DIR", help="model directory, data directory or SentencePiece model"
    )
    parser.add_argument("--decode", action="store_true", help="join subwords to text; special tokens are removed")
    parser.add_argument("--target", action="store_true", help="use the target's vocabulary, if each side has its own")
    parser.add_argument("--ids", action="store_true", help="token ids instead of subwords")


def run(args: argparse.Namespace) -> None:
    from fasttfm.data.corpus import decode_lines
    from fasttfm.data.tokenizer import Tokenizer
    from fasttfm.data.tokenizer_files import load_tokenizers
    from fasttfm.errors import UserError

    tokenizer = load_tokenizers(args.model)[args.target] if args.model.is_dir() else Tokenizer.load(args.model)
    id_of: dict[str, int] = {}
    if args.decode:
        ids = range(len(tokenizer))
        id_of = {word: i for i, word in enumerate(map(str, ids) if args.ids else tokenizer.pieces(ids))}
    for count, line in enumerate(decode_lines(sys.stdin.buffer, "standard input"), start=1):
        if not args.decode:
            words = tokenizer.encode(line)
            _write(" ".join(map(str, words) if args.ids else tokenizer.pieces(words)))
            continue
        try:
            text = tokenizer.decode([id_of[word] for word in line.split(" ") if word])
        except KeyError as error:
            raise UserError(
                f"standard input: line {count:,}: {error.args[0]} is not a subword of {args.model}"
            ) from None
        _write(text)


def _write(line: str) -> None:
    """Write a line; always UTF-8, whatever the locale."""
    sys.stdout.buffer.write(f"{line}\n".encode())
