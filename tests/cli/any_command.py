"""Random situations of every command and verb, generated from its parser, so that new commands are covered.

Required arguments and up to three other flags get values by their type: a choice, a number, an odd value, or a path
that is new, in the world, or a link. Besides the faults of situations.py, the structure of JSON and YAML files is
changed, and .py files are planted with the names of modules that fasttfm imports.
"""

import argparse
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from situations import (
    Situation,
    allow_few_files,
    break_checkpoints,
    break_file,
    break_text,
    change_flag,
    change_path,
    change_setting,
    close_stream,
    deny,
    fill_disk,
    move_folder,
    send_signal,
    usual_command,
)

from fasttfm.cli.main import COMMANDS, build_parser
from fasttfm.cli.paths import PathKind

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
PLANTED = ("sentencepiece", "numpy", "torch", "json", "yaml", "safetensors", "tqdm", "triton", "fasttfm")


def add_to_world(folder: Path) -> None:
    """Write input files of further commands."""
    answers = [{"text": "dog", "answer_start": 4}]
    asked = [{"id": "q", "question": "which dog", "answers": answers}]
    squad = {"version": "1.1", "data": [{"paragraphs": [{"context": "one dog two", "qas": asked}]}]}
    rows = "".join(json.dumps({"text": f"one {i}", "label": str(i % 2)}) + "\n" for i in range(6))
    config = {"model_type": "marian", "d_model": 16, "encoder_layers": 1, "vocab_size": 64, "decoder_layers": 1}
    (folder / "squad.json").write_text(json.dumps(squad))
    (folder / "pairs.jsonl").write_text(rows)
    (folder / "examples.json").write_text(json.dumps([{"text": "one", "options": ["a", "b"], "answer": "a"}] * 3))
    (folder / "theirs").mkdir()
    (folder / "theirs" / "config.json").write_text(json.dumps(config))
    (folder / "theirs" / "tokenizer.json").write_text('{"version": "1.0"}')


def commands() -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """Yield the words of every command and verb, and its parser."""
    for name in COMMANDS:
        parser = _children(build_parser([name]))[name]
        verbs = _children(parser)
        if not verbs:
            yield [name], parser
        for verb, verb_parser in verbs.items():
            deeper = _children(verb_parser)
            yield from (([name, verb, each], other) for each, other in deeper.items())
            if not deeper:
                yield [name, verb], verb_parser


def _children(parser: argparse.ArgumentParser) -> dict[str, Any]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def draw_situation(draw: random.Random, words: list[str], parser: argparse.ArgumentParser) -> Situation:
    """Draw a typical command or this one, with up to two faults; changes files in the working directory."""
    situation = usual_command(draw) if draw.random() < 0.5 else _any_command(draw, words, parser)
    for fault in draw.sample(FAULTS, draw.choice([0, 1, 1, 1, 2])):
        situation.faults.append(fault(situation))
    return situation


def _any_command(draw: random.Random, words: list[str], parser: argparse.ArgumentParser) -> Situation:
    arguments = [*words[1:], *_NEEDED.get(words[0], [])]
    actions = [action for action in parser._actions if not {*action.option_strings} & _NEVER]
    needed = [action for action in actions if action.required and words[0] not in _NEEDED]
    others = [action for action in actions if action.option_strings and not action.required]
    fixed = [action for action in others if {*action.option_strings} & {*_SMALL}]
    free = draw.sample(others, min(len(others), draw.choice([0, 1, 1, 2, 3])))
    for action in [*needed, *fixed, *(each for each in free if each not in fixed)]:
        arguments += _drawn(draw, action)
    return Situation(draw, words[0], arguments, Path("valid.src").read_bytes())


def _drawn(draw: random.Random, action: argparse.Action) -> list[str]:
    flag = [action.option_strings[-1]] if action.option_strings else []
    if action.nargs == 0:
        return flag
    count = action.nargs if isinstance(action.nargs, int) else 1
    return [*flag, *(_value(draw, action, flag) for _ in range(count))]


def _value(draw: random.Random, action: argparse.Action, flag: list[str]) -> str:
    if flag and flag[0] in _SMALL:
        return draw.choice(_SMALL[flag[0]])
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
    files = _paths() if kind.is_file is None else [path for path in _paths() if Path(path).is_file() is kind.is_file]
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
    return sorted(str(path) for path in Path().rglob("*") if path.suffix != ".png" and path.suffix != ".py")


def mutate(situation: Situation) -> str:
    """Change the structure of a JSON or YAML file, keeping its syntax valid; digests are not updated."""
    draw = situation.draw
    files = [path for path in sorted(Path().rglob("*")) if path.suffix in (".json", ".jsonl", ".yaml")]
    files = [path for path in files if path.is_file()]
    if not files:
        return "no structure left to change"
    path = draw.choice(files)
    if path.suffix == ".yaml":
        lines = path.read_text(encoding="utf-8").splitlines()
        wrong = ["!!bool maybe", "!!timestamp nope", "[" * 9999, '"\\ud800"', "*x", "9" * 5000]
        wrong += ["{a: {b: [c]}}", "!!binary x"]
        number = draw.randrange(len(lines))
        lines[number] = f"{lines[number].split(':')[0]}: {draw.choice(wrong)}"
        path.write_text("\n".join(lines), encoding="utf-8")
        return f"{path} with {lines[number][:60]}"
    lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
    number = draw.randrange(len(lines)) if lines else 0
    text = _changed(draw, lines[number] if lines else "{}")
    path.write_text("\n".join([*lines[:number], text, *lines[number + 1 :]]), encoding="utf-8")
    return f"{path} with {text[:60]}..."


def _changed(draw: random.Random, text: str) -> str:
    wrong = ["[" * 99_999, '{"a":' * 9999, '"\\ud800"', "1" + "0" * 30, "9" * 5000, "1e999", "NaN", "null", "[]", "{}"]
    wrong += ["true", '"x"', "-1", "1000000000", "3.5", '[["\\udfff"]]']
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # changed before
        return draw.choice(wrong)
    places = list(_places(content))
    if not places:
        return draw.choice(wrong)
    around, key = draw.choice(places)
    around[key] = "@@"
    return json.dumps(content).replace('"@@"', draw.choice(wrong), 1)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(each, (dict, list)):
            yield from _places(each)


def plant(situation: Situation) -> str:
    """Plant .py files named like dependencies, which leave a trace if they are run."""
    for name in PLANTED:
        Path(f"{name}.py").write_text(f"open('planted', 'a').write({name!r})\n")
    return "planted .py files"


FAULTS: list[Callable[[Situation], str]] = [mutate, mutate, break_file, break_file, change_flag, change_flag]
FAULTS += [plant, break_checkpoints, break_text, change_path, change_setting, deny, fill_disk, send_signal]
FAULTS += [close_stream, allow_few_files, move_folder]
