"""Reads lines of subwords or token numbers, as fasttfm encode writes them, and writes their text. Special tokens are
removed.
"""

import argparse
import sys

from fasttfm.cli import encode

add_arguments = encode.add_arguments


def run(args: argparse.Namespace) -> None:
    """Decode line by line, so that it may stand in a pipe."""
    from fasttfm.data.corpus import decode_lines
    from fasttfm.errors import UserError

    tokenizer = encode.load_tokenizer(args)
    numbers = {piece: number for number, piece in enumerate(tokenizer.pieces(range(len(tokenizer))))}
    if args.ids:
        numbers = {str(number): number for number in numbers.values()}
    for count, line in enumerate(decode_lines(sys.stdin.buffer, "standard input"), start=1):
        try:
            ids = [numbers[word] for word in line.split(" ") if word]
        except KeyError as error:
            raise UserError(
                f"standard input: line {count:,}: {error.args[0]} is not a subword of {args.model}"
            ) from None
        sys.stdout.write(tokenizer.decode(ids) + "\n")
