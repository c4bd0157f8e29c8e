"""Entry point for other kinds of model and their commands, provided by a separate distribution.

The core has a single kind, the translation Transformer. fasttfm-pretraining registers its module in the entry-point
group `fasttfm.kinds`; the core never imports it directly.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fasttfm.errors import UserError

TRANSFORMER = "transformer"
"""The core's kind."""
COMMANDS = {
    "lm": "train, evaluate and run a GPT or Llama",
    "mlm": "train and evaluate a BERT, ALBERT or ELECTRA",
    "finetune": "fine-tune for answers, choices or classes",
}
"""Command -> its line in `fasttfm --help`, whether it is installed or not."""
_GROUP = "fasttfm.kinds"
_MISSING = (
    "fasttfm-pretraining, which is not installed: run pip install ./fasttfm/pretraining above the checkout, or make "
    "install"
)


@cache
def provider() -> Any:
    """The module of the installed distribution, imported on the first call; None if none is installed.

    It has KINDS (kind of model -> its `command` and its `sections`: configuration section -> dataclass), COMMANDS
    (command -> module), LESS_MEMORY (command -> advice for using less memory) and PRESETS (Path of a folder with a
    subfolder of presets per kind).
    """
    return next((entry.load() for entry in entry_points(group=_GROUP)), None)


def pretrained_kinds() -> Mapping[str, Any]:
    """KINDS of the installed distribution."""
    module = provider()
    return {} if module is None else module.KINDS


def refuse_missing(words: list[str]) -> None:
    """Raise UserError if the command line starts with a command that is not installed."""
    if words and words[0] in COMMANDS and provider() is None:
        raise UserError(f"this command is part of {_MISSING}")


def refuse_unknown(kind: str, where: str) -> None:
    """Raise UserError for an unknown kind of model. where: file and line that name it."""
    if kind not in pretrained_kinds():
        known = ", ".join([TRANSFORMER, *pretrained_kinds()])
        more = "" if provider() else f"; GPT, Llama and BERT's family are part of {_MISSING}"
        raise UserError(f"{where}: kind {kind!r} is unknown: choose from {known}{more}")


def module_of(command: str) -> str:
    """The module of one of COMMANDS; '' if it is not installed."""
    module = provider()
    return "" if module is None else module.COMMANDS[command]


def less_memory(command: str | None) -> str | None:
    """Advice for using less memory with one of COMMANDS; None for other commands."""
    module = provider() if command in COMMANDS else None
    return None if module is None else module.LESS_MEMORY[str(command)]
