"""Writes English and German sentences from a small grammar as train, valid and test (.en and .de), always the same."""

from __future__ import annotations

import argparse

from fasttfm.cli.paths import OUTPUT_FOLDER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=OUTPUT_FOLDER, required=True, metavar="DIR", help="directory to write")


def run(args) -> None:
    from fasttfm.data.demo import SPLITS, write_demo_corpus

    write_demo_corpus(args.out)
    sizes = ", ".join(f"{size:,} {split}" for split, size in SPLITS.items())
    print(f"fasttfm demo-data: {args.out} holds {sizes} pairs, English (.en) and German (.de)")
