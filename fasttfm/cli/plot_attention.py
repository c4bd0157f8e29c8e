"""Translates a sentence and draws the attention weights of encoder, decoder and cross-attention: a row of panels for
each layer, a panel for each head.
"""

import argparse

from fasttfm.cli.parser import add_attention_picture, add_device, add_model
from fasttfm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("sentence", metavar="SENTENCE", help="text to translate, in quotation marks")
    add_attention_picture(parser)
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Translate, draw, and say what was translated and where the picture is."""
    from fasttfm.decoding.attention_plot import attention_of, draw_attention
    from fasttfm.decoding.translator import Translator

    try:
        args.sentence.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"the sentence {args.sentence!r} is not valid UTF-8: give it in the terminal's encoding"
        ) from None
    translator = Translator.from_directory(args.model, args.checkpoint, device=args.device)
    attention = attention_of(translator, args.sentence)
    draw_attention(attention, args.out, args.layers)
    print(f"{attention.translation}\n{args.out}")
