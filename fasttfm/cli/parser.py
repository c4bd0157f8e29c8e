"""The command line's parser: argparse, but every complaint is one line that names the nearest flag.

Numbers are read as in configuration files (fasttfm.config.convert), paths by their purpose (fasttfm.cli.paths).
"""

import argparse
import difflib
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fasttfm.cli.paths import CHECKPOINT, LOADED_FOLDER, MODEL, OUTPUT_FOLDER, SHARED_FOLDER, PathKind
from fasttfm.config.convert import convert
from fasttfm.errors import UserError
from fasttfm.system.parsing import WHOLE_NUMBER, parse_yaml

_METAVARS: dict[Any, str] = {int: "N", float: "X"}
_EXAMPLES = "examples:\n"


class _Help(argparse.HelpFormatter):
    """Help in which a flag's type says the word that stands for its value, where the flag itself does not."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind: Any = action.type
        if isinstance(kind, PathKind):
            return kind.metavar
        return _METAVARS.get(
            kind.kind if isinstance(kind, InRange) else kind
        ) or super()._get_default_metavar_for_optional(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap each paragraph but the one of examples."""
        fill = super()._fill_text
        paragraphs = text.split("\n\n")
        return "\n\n".join(each if each.startswith(_EXAMPLES) else fill(each, width, indent) for each in paragraphs)


class _HelpAll(argparse.Action):
    """Prints the help of all flags and stops."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.shown = None
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit; takes no abbreviated flags."""

    needs: Mapping[str, Sequence[str]] = {}
    """Flag -> flags of which one must be given beside it."""
    apart: Sequence[tuple[str, str]] = ()
    """Pairs of flags that mean nothing beside one another."""
    elsewhere: Mapping[str, str] = {}
    """fairseq's flags -> what to do in their place."""
    shown: frozenset[str] | None = None
    """The flags that --help shows; None: all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # --max-tok must not silently change its meaning when a version adds --max-token-something
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **kwargs})

    def shorten(self, *flags: str, examples: str) -> None:
        """Let --help show these flags, the arguments that are none, and examples, a line each; --help-all shows all."""
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every flag and stop")
        self.shown = frozenset(("--help", "--help-all", *flags))
        if self.usage is None:
            formatter = self._get_formatter()
            formatter.add_usage(None, [each for each in self._actions if each.required], [], "")
            self.usage = f"{' '.join(formatter.format_help().split())} [--FLAG VALUE …]"
        lines = "".join(f"  {line.strip()}\n" for line in examples.strip().splitlines())
        self.epilog = "\n\n".join(filter(None, [self.epilog, f"{_EXAMPLES}{lines}"]))

    def format_help(self) -> str:
        """The help as argparse has it, of the flags that are shown."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, list(self._of_help(self._actions)), self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            if actions := list(self._of_help(group._group_actions)):
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _of_help(self, actions: Iterable[argparse.Action]) -> Iterable[argparse.Action]:
        shown = self.shown
        return (each for each in actions if shown is None or not each.option_strings or shown & {*each.option_strings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but refuse unknown arguments, and flags that would be ignored beside the others."""
        self._given: set[str] = set()
        for word in args or ():
            if word.startswith("-"):
                self._refuse_removed(word.split("=")[0])
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        for flag, others in self.needs.items():
            if flag in self._given and self._given.isdisjoint(others):
                raise UserError(f"{flag} goes with {' or '.join(others)}: give both, or leave out {flag}")
        for one, other in self.apart:
            if self._given.issuperset((one, other)):
                raise UserError(f"{one} and {other} do not go together: leave out one of them")
        return parsed, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Read the values of one argument like argparse, but refuse a second file where only the last would count."""
        if action.option_strings:
            flag = action.option_strings[0]
            if flag in self._given and isinstance(action.type, PathKind) and type(action) is argparse._StoreAction:
                self.error(f"{flag} was given twice")
            self._given.add(flag)
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Read one value: Python's own int and float read 1_0 as ten, and nan."""
        if action.type not in (int, float):
            return super()._get_value(action, arg_string)
        name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
        return convert(arg_string, action.type, name)

    def error(self, message: str) -> NoReturn:
        """Raise UserError; argparse calls it for a wrong command line."""
        end = "" if message.endswith("?") else ";"
        raise UserError(f"{message}{end} {self.prog} --help lists what there is")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown command with the nearest name in place of all names."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self._unknown(value, action.choices)
        super()._check_value(action, value)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print like argparse, but report a full disk or a reader that has gone, which argparse ignores."""
        (file or sys.stderr).write(message)

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"{word!r} was not expected here")
        self._unknown(word.split("=")[0], self._option_string_actions)

    def _unknown(self, word: str, known: Iterable[str]) -> NoReturn:
        self._refuse_removed(word)
        near = difflib.get_close_matches(word.replace("_", "-"), list(known), n=1, cutoff=0.5)
        self.error(f"{word} is unknown: did you mean {near[0]}?" if near else f"{word} is unknown")

    def _refuse_removed(self, word: str) -> None:
        if word in self.elsewhere:
            raise UserError(f"{word} is fairseq's: {self.elsewhere[word]}")
        if instead := _removed().get(self.prog, {}).get(word):
            self.error(f"{word} was removed: {instead}")


@functools.cache
def _removed() -> dict[str, dict[str, str]]:
    """Command -> flag, or command, that was removed -> what to use instead."""
    return parse_yaml(Path(__file__).with_name("removed.yaml").read_bytes())


@dataclass(frozen=True)
class InRange:
    """The `type` of an argument that is a number from `least` to `most`."""

    least: float
    most: float
    kind: type = int

    def __call__(self, text: str) -> float:
        """The value of the argument, as argparse asks for it; raises ArgumentTypeError for any other."""
        try:
            value = int(text) if self.kind is int and WHOLE_NUMBER.fullmatch(text) else convert(text, self.kind, "")
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from None
        if not self.least <= value <= self.most:
            raise argparse.ArgumentTypeError(f"{text!r} was given, it must be from {self.least:,} to {self.most:,}")
        return value


THREADS = InRange(1, 1024)


def _layer_numbers(text: str) -> list[int]:
    """The layers that --layers names."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"--layers {text!r}: give numbers such as 1,4") from None


def add_model(parser: argparse.ArgumentParser, made_by: str = "fasttfm train") -> None:
    """A model directory and which of its checkpoints; made_by: the commands that make one."""
    parser.add_argument("model", type=MODEL, metavar="MODEL", help=f"model directory made by {made_by}")
    add_checkpoint(parser)


def add_checkpoint(parser: argparse._ActionsContainer) -> None:
    """--checkpoint: which of a model directory's."""
    parser.add_argument(
        "--checkpoint",
        type=CHECKPOINT,
        default="best",
        metavar="WHICH",
        help="best, last, average, the number of an update, or the path of a checkpoint (default: %(default)s)",
    )


def add_data(parser: argparse.ArgumentParser, text: str) -> None:
    """--data: a prepared directory, which must be given."""
    parser.add_argument("--data", type=LOADED_FOLDER, required=True, metavar="DATA", help=text)


def add_out(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """--out: the directory to write, which must be given."""
    parser.add_argument("--out", type=OUTPUT_FOLDER, required=True, metavar=metavar, help=text)


def add_downloads(parser: argparse.ArgumentParser) -> None:
    """--data-dir and --mirror: where the files of a dataset are kept, and where they come from."""
    parser.add_argument(
        "--data-dir",
        type=SHARED_FOLDER,
        default=Path("data"),
        help="folder that keeps the downloads and text of datasets; files that are in DIR/downloads are not downloaded "
        "again (default: %(default)s)",
    )
    parser.add_argument(
        "--mirror",
        action="append",
        default=[],
        metavar="URL",
        help="address that has the same files; tried before the official ones; may be repeated",
    )


def add_attention_layers(parser: argparse._ActionsContainer) -> None:
    """--layers of a picture of attention weights."""
    text = "layers to draw, counted from 1, such as 1,4 (default: all)"
    parser.add_argument("--layers", type=_layer_numbers, metavar="N,N", help=text)


def add_device(parser: argparse._ActionsContainer) -> None:
    """--device: where it is computed."""
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")


def add_precision(parser: argparse.ArgumentParser, dest: str = "precision") -> None:
    """--precision: in which type."""
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16", "int8"),
        dest=dest,
        help="type of weights and matrix products; int8 is for products on a CPU (default: fp32, or int8 for a "
        "quantized model)",
    )


def add_workers(parser: argparse.ArgumentParser, text: str, default: str = "auto", timed: bool = False) -> None:
    """--workers: how many processes; None for auto. text: what they do. timed: TIME can be given, too."""
    words = ("auto", TIME) if timed else ("auto",)
    text, kind = f"{text} (default: %(default)s)", functools.partial(_worker_count, words)
    parser.add_argument("--workers", default=default, type=kind, metavar="|".join([*words, "N"]), help=text)


TIME = "time"
"""The word that asks --workers to find out."""


def _worker_count(words: Sequence[str], text: str) -> int | str | None:
    """The number of processes that --workers asks for, None for auto, or TIME where that is one of the words."""
    if text in words:
        return None if text == "auto" else text
    if not WHOLE_NUMBER.fullmatch(text) or not 1 <= int(text) <= 1024:
        allowed = ", ".join(words)
        raise argparse.ArgumentTypeError(f"{text!r} was given, it must be {allowed} or a number from 1 to 1024")
    return int(text)
