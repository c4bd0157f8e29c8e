"""`fasttfm translate MODEL < in.en > out.de`: one line out for every line in."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fasttfm.config import add_flags, flag_values
from fasttfm.config.convert import WHOLE_NUMBER
from fasttfm.errors import UserError

if TYPE_CHECKING:
    from fasttfm.decoding.translator import Translation


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "translate",
        help="translate standard input, line by line",
        description="Translates UTF-8 text from standard input to standard output, one sentence a line: one line out "
        "for every line in, empty ones included. Settings that are not given are those of the model's config.yaml. "
        "With --nbest above 1 the output is `NUMBER ||| TRANSLATION ||| SCORE`, NUMBER being that of the line from 0.",
    )
    parser.add_argument("model", metavar="MODEL", help="model directory made by fasttfm train")
    parser.add_argument(
        "--checkpoint",
        default="best",
        metavar="WHICH",
        help="best, last, average, the number of an update, or the path of a checkpoint (default: %(default)s)",
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: a GPU where there is one)")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16", "int8"),
        dest="translation_precision",
        help="type of the weights and matrix products; int8: of the products, on a CPU (default: fp32, or int8 for a "
        "model of fasttfm quantize)",
    )
    parser.add_argument(
        "--workers",
        default="auto",
        type=_workers,
        metavar="auto|N",
        help="processes that each translate sentences of their own on a CPU, with one copy of the weights; auto: as "
        "many as PyTorch would compute with, OMP_NUM_THREADS or one a core, when there is enough to do (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--prefix",
        type=Path,
        metavar="FILE",
        help="a line for every input line: what its translation must begin with, empty for anything",
    )
    parser.add_argument(
        "--ensemble",
        action="append",
        default=[],
        metavar="MODEL",
        help="another model directory with the same tokenizer, whose probabilities are averaged with MODEL's; may be "
        "repeated",
    )
    parser.add_argument(
        "--banned",
        type=Path,
        metavar="FILE",
        help="words or phrases, one a line, that no translation holds as the tokenizer spells them; other words that "
        "begin with the same tokens are banned too",
    )
    parser.add_argument(
        "--terminology",
        type=Path,
        metavar="FILE",
        help="terms, one a line: the source's, a tab, and its translations separated by tabs; where it occurs in a "
        "line, one of them comes in the translation",
    )
    parser.add_argument(
        "--alignment",
        type=Path,
        metavar="FILE",
        help="write the word alignment of every output line to a file, in Pharaoh format: `0-0 1-2` links source words "
        "with words of the translation, counted from 0 between spaces",
    )
    parser.add_argument(
        "--markup",
        action="store_true",
        help="lines hold XML-like tags, which come in the translation around the words that theirs are aligned with; & "
        "and < of text are &amp; and &lt;, on both sides",
    )
    add_flags(parser, ["decoding"])


def run(args: argparse.Namespace) -> None:
    """Translate standard input, buffer by buffer."""
    from fasttfm.data.corpus import decode_lines, read_lines
    from fasttfm.decoding.alignment import PARTS, WORDS, pharaoh
    from fasttfm.decoding.markup import translate_marked
    from fasttfm.decoding.translator import Translator

    if args.markup and args.alignment is not None:
        raise UserError(
            "--markup and --alignment were both given: a translation with tags is not aligned, leave out one"
        )
    settings = flag_values(args, ["decoding"])
    if sys.stdin.isatty():
        settings["buffer_size"] = 1  # somebody is typing and waits for each line
    translator = Translator.from_directory(
        args.model,
        args.checkpoint,
        device=args.device,
        precision=args.translation_precision,
        workers=args.workers,
        banned=[] if args.banned is None else list(read_lines(args.banned)),
        ensemble=args.ensemble,
        terminology=args.terminology,
        aligned=PARTS if args.markup else None if args.alignment is None else WORDS,
        **settings,
    )
    with contextlib.ExitStack() as stack:
        alignment = None if args.alignment is None else stack.enter_context(args.alignment.open("w", encoding="utf-8"))
        prefixes = None if args.prefix is None else read_lines(args.prefix)
        lines = decode_lines(sys.stdin.buffer, "standard input")
        translate = functools.partial(translate_marked, translator) if args.markup else translator.translate_stream
        for number, translations in enumerate(translate(lines, prefixes)):
            _write(number, translations, numbered=translator.config.nbest > 1)
            if alignment is not None:
                alignment.writelines(f"{pharaoh(each.alignment)}\n" for each in translations)
    if translator.cut_lines:
        one = translator.cut_lines == 1
        print(
            f"fasttfm translate: warning: {translator.cut_lines:,} {'line has' if one else 'lines have'} more than "
            f"{translator.config.max_source_length:,} tokens and {'was' if one else 'were'} cut off there (first: "
            f"line {translator.first_cut_line:,}): split them into sentences, or raise --max-source-length",
            file=sys.stderr,
        )


def _write(number: int, translations: list[Translation], numbered: bool) -> None:
    """The lines of one input line to standard output, at once, in UTF-8 whatever the locale says."""
    if numbered:
        text = "".join(f"{number} ||| {each.text} ||| {each.score:.6f}\n" for each in translations)
    else:
        text = f"{translations[0].text}\n"
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _workers(text: str) -> int | None:
    """The number of processes that --workers asks for, None for auto."""
    if text == "auto":
        return None
    if not WHOLE_NUMBER.fullmatch(text) or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} was given, it must be auto or a number from 1 to 1024")
    return int(text)
