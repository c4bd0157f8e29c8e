"""`fasttfm --completion SHELL`: a completion script for commands, flags and files. Needs shtab (extra: completion)."""

import argparse
from collections.abc import Sequence
from typing import Any

from fasttfm.cli.paths import PathKind

SHELLS = ("bash", "fish", "tcsh", "zsh")


class Completion(argparse.Action):
    """Prints the completion script and exits; UserError without shtab. const: builds the parser of all commands."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from fasttfm.errors import optional

        shtab = optional("shtab", "completion")
        whole = self.const()
        _complete_files(whole._actions, shtab.FILE)
        print(shtab.complete(whole, values))
        parser.exit()


def _complete_files(actions: Sequence[argparse.Action], files: Any) -> None:
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_files(each._actions, files)
        elif isinstance(action.type, PathKind):
            action.complete = files  # type: ignore[attr-defined]
