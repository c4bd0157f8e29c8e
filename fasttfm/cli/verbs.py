"""Commands of several verbs, such as `fasttfm lm train`."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fasttfm.cli.parser import Parser


class Verb(NamedTuple):
    """A verb: its arguments, its function and its line of help."""

    add_arguments: Callable[[Any], None]
    run: Callable[[argparse.Namespace], int | None]
    summary: str
    description: str = ""
    """First paragraph of its --help; the summary if empty."""


def add_verbs(parser: argparse.ArgumentParser, verbs: Mapping[str, Verb]) -> None:
    """Add the verbs of a command."""
    subparsers = parser.add_subparsers(metavar="verb", title="verbs", parser_class=Parser, required=True)
    for name, verb in verbs.items():
        description = verb.description or f"{verb.summary[0].upper()}{verb.summary[1:]}."
        verb_parser = subparsers.add_parser(name, help=verb.summary, description=description)
        # the words after fasttfm, by which the verb calls itself
        verb_parser.set_defaults(run=verb.run, parser=verb_parser, verb=f"{parser.prog.rpartition(' ')[2]} {name}")
        verb.add_arguments(verb_parser)
