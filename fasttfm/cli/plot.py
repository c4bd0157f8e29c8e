"""Plots training loss, validation loss and BLEU of training runs, one colour per run.

With --attention it translates a sentence and plots the attention weights of encoder, decoder and cross-attention: one
row of panels per layer, one panel per head.
"""

import argparse

from fasttfm.cli.parser import Parser, add_attention_layers, add_checkpoint, add_device
from fasttfm.cli.paths import MODEL, OUTPUT_PICTURE
from fasttfm.errors import UserError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", nargs="+", type=MODEL, metavar="MODEL", help="model directory made by fasttfm train")
    parser.add_argument("--out", type=OUTPUT_PICTURE, required=True, help="picture to write, .png or .svg")
    parser.add_argument(
        "--over",
        choices=("updates", "minutes"),
        default="updates",
        help="unit of the horizontal axis (default: %(default)s)",
    )
    group = parser.add_argument_group("attention weights of one model")
    group.add_argument("--attention", metavar="SENTENCE", help="text to translate, in quotation marks")
    add_attention_layers(group)
    add_checkpoint(group)
    add_device(group)
    parser.needs = {flag: ["--attention"] for flag in ("--layers", "--checkpoint", "--device")}
    parser.apart = [("--attention", "--over")]


def run(args: argparse.Namespace) -> None:
    if args.attention is None:
        from fasttfm.training.plots import plot_runs

        plot_runs(args.model, args.out, args.over)
    else:
        print(_draw_attention(args))
    print(args.out)


def _draw_attention(args: argparse.Namespace) -> str:
    """Plot the attention weights of one translation and return the translation."""
    from fasttfm.translate.attention_plot import attention_of, draw_attention
    from fasttfm.translate.translator import Translator

    if len(args.model) > 1:
        raise UserError(f"--attention draws one model, not {len(args.model)}: give one")
    try:
        args.attention.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"the sentence {args.attention!r} is not valid UTF-8: give it in the terminal's encoding"
        ) from None
    translator = Translator.from_directory(args.model[0], args.checkpoint, device=args.device)
    attention = attention_of(translator, args.attention)
    draw_attention(attention, args.out, args.layers)
    return attention.translation
