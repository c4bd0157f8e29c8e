"""The core's one door to other kinds of model and their commands, which a distribution of its own brings.

The core itself knows one kind, the Transformer that translates. fasttfm-pretraining names its module in the entry-point
group `fasttfm.kinds`; no file of the core imports it.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from fasttfm.errors import UserError

COMMANDS = {
    "lm": "train, evaluate and run a GPT or Llama",
    "mlm": "train and evaluate a BERT, ALBERT or ELECTRA",
    "finetune": "fine-tune for answers, choices or classes",
}
"""Command -> the line that `fasttfm --help` shows, whether it is installed or not."""
_GROUP = "fasttfm.kinds"
_MISSING = (
    "fasttfm-pretraining, which is not installed: pip install ./pretraining in a clone of this repository "
    "(make install does it)"
)


class Kind(Protocol):
    """A kind of model, as far as the core needs to know it."""

    @property
    def command(self) -> str:
        """The command that takes such a model, as it stands after `fasttfm`."""

    @property
    def sections(self) -> dict[str, type]:
        """Section of its configuration -> dataclass."""


class Provider(Protocol):
    """The contents of a module that an entry point names."""

    KINDS: Mapping[str, Kind]
    COMMANDS: Mapping[str, str]
    """Command -> its module."""
    LESS_MEMORY: Mapping[str, str]
    """Command -> what makes it need less memory."""
    PRESETS: Path
    """Folder with a folder of presets for each kind."""


@cache
def provider() -> Provider | None:
    """Return the module of the installed distribution, imported by the first call; None where none is installed."""
    for entry in entry_points(group=_GROUP):
        return cast(Provider, entry.load())
    return None


def pretrained_kinds() -> Mapping[str, Kind]:
    """Kind of model -> what it is made of."""
    found = provider()
    return {} if found is None else found.KINDS


def refuse_missing(words: list[str]) -> None:
    """Raise UserError for the arguments of a command that is not installed."""
    if words and words[0] in COMMANDS and provider() is None:
        raise UserError(f"this command is part of {_MISSING}")


def refuse_unknown(kind: str, where: str) -> None:
    """Raise UserError for a kind of model that nobody here knows; where: the file that names it, and the line."""
    if kind not in pretrained_kinds():
        known = ", ".join(["transformer", *pretrained_kinds()])
        more = "" if provider() else f"; GPT, Llama and BERT's family are part of {_MISSING}"
        raise UserError(f"{where}: kind {kind!r} is unknown: there are {known}{more}")


def module_of(command: str) -> str:
    """Return the name of the module of one of COMMANDS; '' where it is not installed."""
    found = provider()
    return "" if found is None else found.COMMANDS[command]


def less_memory(command: str | None) -> str | None:
    """Return what makes one of COMMANDS need less memory; None for other commands."""
    found = provider() if command in COMMANDS else None
    return None if found is None else found.LESS_MEMORY[str(command)]
