"""The core's one door to fasttfm.pretraining: its kinds of model, and its commands.

The core itself knows one kind, the Transformer that translates. No other file outside that room imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fasttfm.pretraining.commands import COMMANDS, LESS_MEMORY, VERBS

if TYPE_CHECKING:
    from fasttfm.pretraining.kinds import Kind

__all__ = ["COMMANDS", "LESS_MEMORY", "pretrained_kinds", "verbs_of"]


def pretrained_kinds() -> dict[str, Kind]:
    """Kind of model -> what it is made of. The room is imported by the first call: translating needs none of it."""
    from fasttfm.pretraining.kinds import KINDS

    return KINDS


def verbs_of(command: str) -> dict[str, Any]:
    """The verbs that the room adds to a command of the core."""
    verbs: dict[str, Any] = import_module(VERBS[command]).VERBS
    return verbs
