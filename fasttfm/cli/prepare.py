"""`fasttfm prepare`: parallel text to a prepared data directory."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fasttfm.data.tokenizer import MODEL_TYPES, NORMALIZATIONS


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "prepare",
        help="turn parallel text into a prepared data directory",
        description="Trains SentencePiece on the training text and writes token ids for training and validation. "
        "Text files are UTF-8, one sentence a line, plain or gzip, bzip2, xz or zstandard. Several files of a side are "
        "one corpus in the order in which they are given, evenly mixed in training.",
    )
    for flag, text in (
        ("--src", "training source text"),
        ("--tgt", "training target text"),
        ("--valid-src", "validation source text"),
        ("--valid-tgt", "validation target text"),
    ):
        parser.add_argument(
            flag, nargs="+", action="extend", type=Path, required=True, metavar="FILE", help=f"{text}; may be repeated"
        )
    parser.add_argument("--out", type=Path, required=True, metavar="DATA", help="the directory to write")
    parser.add_argument(
        "--vocab-size", type=int, default=8000, help="subwords, special ones included (default: %(default)s)"
    )
    parser.add_argument(
        "--separate-vocab", action="store_true", help="one vocabulary of that size for each side, not a joint one"
    )
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="bpe", help="default: %(default)s")
    parser.add_argument(
        "--character-coverage",
        type=float,
        metavar="SHARE",
        help="share of the characters with a piece of their own, from 0.98 (default: 1.0, or 0.9995 for large scripts)",
    )
    parser.add_argument(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write rare characters as bytes, so that none is unknown; takes 256 pieces (default: on)",
    )
    parser.add_argument(
        "--normalization",
        choices=NORMALIZATIONS,
        default="identity",
        help="how text is normalised before splitting (default: %(default)s, so that raw references can be reached)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        default=256,
        metavar="N",
        help="leave out pairs with more subwords than this on a side (default: %(default)s)",
    )
    parser.add_argument(
        "--replace-invalid",
        action="store_true",
        help="read bytes that are not UTF-8 as U+FFFD and count their lines (default: such text is refused)",
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="for splitting text (default: all cores)"
    )


def run(args) -> None:
    from fasttfm.data.prepare import PrepareOptions, prepare

    options = PrepareOptions(
        vocab_size=args.vocab_size,
        separate_vocab=args.separate_vocab,
        model_type=args.model_type,
        character_coverage=args.character_coverage,
        byte_fallback=args.byte_fallback,
        normalization=args.normalization,
        max_length=args.max_length,
        replace_invalid=args.replace_invalid,
    )
    prepare(
        args.src,
        args.tgt,
        args.valid_src,
        args.valid_tgt,
        args.out,
        options,
        threads=args.threads,
        say=lambda line: print(f"fasttfm prepare: {line}", flush=True),
    )
