"""Random situations of every command and verb, generated from its parser, so that new commands are covered.

Required arguments and up to three other flags get values by their type: a choice, a number, an odd value, or a path
that is new, in the world, or a link.
"""

import argparse
import os
import random
from pathlib import Path
from typing import Any

from situations import COMMANDS as USUAL
from situations import FAULTS, Situation

from fasttfm.cli.main import COMMANDS, build_parser
from fasttfm.cli.paths import PathKind

OUTPUTS = {
    "prepare": ("fresh", "a/b/c", "data", "data", "model", "model/checkpoints", ".", "train.src"),
    "train": ("fresh", "model", "model", "model", "data", "."),
}
"""Output paths: new directories, the command's own, and those of other commands."""
_NEVER = {"--help", "--help-all", "--dataset", "--mirror", "--data-dir", "--threads", "--port", "--train"}
"""Flags that print and exit, use the network, or depend on this machine."""
_NEEDED = {"recipe": ["multi30k", "--estimate", "1000"]}
"""Arguments that keep a command from downloading and training for hours."""
_SMALL = {
    "--device": ["cpu"],
    "--max-update": ["1"],
    "--max-minutes": ["0.02"],
    "--d-model": ["16"],
    "--heads": ["2"],
    "--workers": ["1"],
}
_NUMBERS = ["0", "1", "2", "3", "-1", "1e400", "9" * 19, "1000000000", "0.5", "nan", "010"]
_WORDS = ["one", "", "en", "\udcff", "a\0b", "x" * 5000, "cpu", "last", "{text} {answer}", "[", "日"]
_NEW = ["fresh", "fresh/a", "fresh.png", "fresh.json", "ü x"]


def _children(parser: argparse.ArgumentParser) -> dict[str, Any]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def _parsers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    waiting = [(name, _children(build_parser([name]))[name]) for name in COMMANDS]
    for words, parser in waiting:
        below = _children(parser)
        waiting += ((f"{words} {verb}", each) for verb, each in below.items())
        if not below:
            found[words] = parser
    return found


PARSERS = _parsers()
"""Every command, or verb of a command, as typed -> its parser."""


def draw_situation(draw: random.Random, words: list[str]) -> Situation:
    """Draw a typical command or this one, with up to two faults; changes files in the working directory."""
    situation = _usual_command(draw) if draw.random() < 0.5 else _any_command(draw, words)
    for fault in draw.sample(FAULTS, draw.choice([0, 1, 1, 1, 2])):
        situation.faults.append(fault(situation))
    return situation


def _usual_command(draw: random.Random) -> Situation:
    command = draw.choice(list(USUAL))
    arguments = USUAL[command].split()
    if command in OUTPUTS:
        arguments.append(draw.choice(OUTPUTS[command]))
    if command == "prepare":
        arguments[arguments.index("64")] = draw.choice(["64", "60"])
    if command == "translate" and draw.random() < 0.3:
        arguments = [*arguments[:3], "--score", "valid.tgt"]
    if command == "plot":
        arguments.append(draw.choice(["one two", "", "\u00a0", "ü 日 $x$", "a\0b", "dog " * 100, "\udcff"]))
    return Situation(draw, command, arguments, Path("valid.src").read_bytes())


def _any_command(draw: random.Random, words: list[str]) -> Situation:
    arguments = [*words[1:], *_NEEDED.get(words[0], [])]
    actions = [action for action in PARSERS[" ".join(words)]._actions if not {*action.option_strings} & _NEVER]
    needed = [action for action in actions if action.required and words[0] not in _NEEDED]
    others = [action for action in actions if action.option_strings and not action.required]
    fixed = [action for action in others if {*action.option_strings} & {*_SMALL}]
    free = draw.sample(others, min(len(others), draw.choice([0, 1, 1, 2, 3])))
    for action in [*needed, *fixed, *(each for each in free if each not in fixed)]:
        count = action.nargs if isinstance(action.nargs, int) else 1
        arguments += [*action.option_strings[-1:], *(_value(draw, action) for _ in range(count))]
    return Situation(draw, words[0], arguments, Path("valid.src").read_bytes())


def _value(draw: random.Random, action: argparse.Action) -> str:
    flag = action.option_strings[-1] if action.option_strings else ""
    if flag in _SMALL:
        return draw.choice(_SMALL[flag])
    if action.choices is not None and draw.random() < 0.9:
        return str(draw.choice(list(action.choices)))
    if action.dest in ("model", "models", "teacher", "body", "init_from") and draw.random() < 0.7:
        return "model"
    if action.dest == "data" and draw.random() < 0.7:
        return "data"
    if isinstance(action.type, PathKind):
        return _path(draw, action.type)
    if action.type is None and draw.random() < 0.5:
        return draw.choice([*_NEW, *_paths()])
    return draw.choice(_NUMBERS if action.type in (int, float) else [*_WORDS, *_NUMBERS])


def _path(draw: random.Random, kind: PathKind) -> str:
    """Draw a new name (mostly for outputs), a path of the world, or a link to one."""
    if draw.random() < (0.5 if kind.writes else 0.1):
        return draw.choice(_NEW)
    files = [path for path in _paths() if kind.is_file in (None, Path(path).is_file())]
    path = draw.choice(files if files and draw.random() < 0.8 else _paths())
    if draw.random() < 0.2:
        link = f"link-{draw.randrange(10**6)}"
        if draw.random() < 0.5 and Path(path).is_file():
            os.link(path, link)
        else:
            Path(link).symlink_to(path)
        return link
    return path


def _paths() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.suffix not in (".png", ".py"))
