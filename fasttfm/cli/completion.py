"""Prints a script that makes a shell complete fasttfm's commands, flags and files. Needs shtab (extra: completion)."""

import argparse
from typing import Any

from fasttfm.cli.paths import PathKind

_SHELLS = {
    "bash": "fasttfm completion bash > ~/.local/share/bash-completion/completions/fasttfm",
    "zsh": "fasttfm completion zsh > a folder of $fpath, as _fasttfm",
    "tcsh": "fasttfm completion tcsh > a file that ~/.tcshrc sources",
    "fish": "fasttfm completion fish > ~/.config/fish/completions/fasttfm.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(_SHELLS))
    parser.epilog = "Where the script belongs: " + "; ".join(_SHELLS.values())


def run(args: argparse.Namespace) -> None:
    """Print the script. Raises UserError without shtab."""
    from fasttfm.cli.main import COMMANDS, build_parser
    from fasttfm.errors import optional

    shtab = optional("shtab", "completion")
    parser = build_parser(list(COMMANDS))
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, args.shell))


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_files(each, files)
        elif isinstance(action.type, PathKind):
            action.complete = files  # type: ignore[attr-defined]
