"""fairseq-train's flags in `fasttfm train`: what differs only by name is taken, what has no counterpart is told so."""

import argparse
from pathlib import Path
from typing import Any

from fasttfm.errors import UserError
from fasttfm.parsing import parse_yaml

_TABLE = parse_yaml(Path(__file__).with_suffix(".yaml").read_bytes())
ALIASES: dict[str, str] = _TABLE["aliases"]
"""fairseq's flags -> the field or the argument here."""
ELSEWHERE: dict[str, str] = _TABLE["elsewhere"]
"""fairseq's flags -> what to do in their place."""

_VALUES = {"schedule": {"inverse_sqrt": "inverse-sqrt", "fixed": "constant"}, "activation": {"swish": "silu"}}
"""Field -> fairseq's word for a value -> the word here."""


def add_fairseq_flags(parser: argparse.ArgumentParser) -> None:
    """Let a parser, which has our own flags, know fairseq's; its help does not show them."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flags, name in ALIASES.items():
        parser.add_argument(*flags.split(), dest=name, action=_Alias, **hidden)
    for flags, told in ELSEWHERE.items():
        parser.add_argument(*flags.split(), nargs="?", const=told, action=_Elsewhere, **hidden)


class _Alias(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, flag: Any = None) -> None:
        given = _VALUES.get(self.dest, {}).get(value, value)
        before = getattr(namespace, self.dest, None)
        if before is not None and str(before) != given:
            ours = f"--{self.dest.replace('_', '-')}"
            raise UserError(f"{flag} {value}: is {ours} here, which is {before} already: both sides have one")
        setattr(namespace, self.dest, Path(given) if self.dest in ("out", "init_from") else given)


class _Elsewhere(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, flag: Any = None) -> None:
        raise UserError(f"{flag} is fairseq's: {self.const}")
