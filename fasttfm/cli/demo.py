"""Writes English and German sentences from a small grammar as train, valid and test (.en and .de), always the same."""

import argparse

from fasttfm.cli.parser import add_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_out(parser, "DIR", "directory to write")


def run(args) -> None:
    from fasttfm.data.demo import SPLITS, write_demo_corpus

    write_demo_corpus(args.out)
    sizes = ", ".join(f"{size:,} {split}" for split, size in SPLITS.items())
    print(f"fasttfm demo-data: {args.out} holds {sizes} pairs, English (.en) and German (.de)")
