"""Commands with verbs, such as `fasttfm lm train`."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fasttfm.cli.parser import Parser


class Verb(NamedTuple):
    """One verb of a command."""

    add_arguments: Callable[[Any], None]
    run: Callable[[argparse.Namespace], int | None]
    summary: str
    description: str = ""
    """First paragraph of --help; the summary if empty."""


def add_verbs(parser: argparse.ArgumentParser, verbs: Mapping[str, Verb]) -> None:
    """Add a subparser for each verb of a command."""
    subparsers = parser.add_subparsers(metavar="verb", title="verbs", parser_class=Parser, required=True)
    for name, verb in verbs.items():
        description = verb.description or f"{verb.summary[0].upper()}{verb.summary[1:]}."
        verb_parser = subparsers.add_parser(name, help=verb.summary, description=description)
        verb_parser.set_defaults(run=verb.run, parser=verb_parser, verb=f"{parser.prog.rpartition(' ')[2]} {name}")
        verb.add_arguments(verb_parser)
