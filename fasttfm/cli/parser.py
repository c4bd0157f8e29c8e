"""argparse with one-line errors that suggest the nearest flag, and the arguments that several commands share.

Numbers are parsed as in configuration files (fasttfm.config.convert); paths have a purpose (fasttfm.cli.paths).
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
    """Help formatter: the argument's type gives the default metavar, and examples are not wrapped."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind: Any = action.type
        if isinstance(kind, PathKind):
            return kind.metavar
        number = kind.kind if isinstance(kind, InRange) else kind
        return _METAVARS.get(number) or super()._get_default_metavar_for_optional(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap every paragraph except the examples."""
        fill = super()._fill_text
        paragraphs = text.split("\n\n")
        return "\n\n".join(part if part.startswith(_EXAMPLES) else fill(part, width, indent) for part in paragraphs)


class _HelpAll(argparse.Action):
    """Prints the help of all flags and exits."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.shown = None
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Raises UserError instead of printing usage and exiting; does not accept abbreviated flags."""

    needs: Mapping[str, Sequence[str]] = {}
    """Flag -> flags, at least one of which it requires."""
    apart: Sequence[tuple[str, str]] = ()
    """Pairs of mutually exclusive flags."""
    elsewhere: Mapping[str, str] = {}
    """fairseq flag -> its replacement."""
    shown: frozenset[str] | None = None
    """Flags shown by --help; None: all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # an abbreviation such as --max-tok would change its meaning when a version adds --max-token-something
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **kwargs})

    def shorten(self, *flags: str, examples: str) -> None:
        """Show only these flags, positional arguments and examples (one a line) in --help; --help-all shows all."""
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every flag and stop")
        self.shown = frozenset(("--help", "--help-all", *flags))
        if self.usage is None:
            formatter = self._get_formatter()
            formatter.add_usage(None, [action for action in self._actions if action.required], [], "")
            self.usage = f"{' '.join(formatter.format_help().split())} [--FLAG VALUE …]"
        lines = "".join(f"  {line.strip()}\n" for line in examples.strip().splitlines())
        self.epilog = "\n\n".join(filter(None, [self.epilog, f"{_EXAMPLES}{lines}"]))

    def format_help(self) -> str:
        """Format the help as argparse does, restricted to the flags in `shown`."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._visible(self._actions), self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            if actions := self._visible(group._group_actions):
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _visible(self, actions: Iterable[argparse.Action]) -> list[argparse.Action]:
        shown = self.shown
        return [a for a in actions if shown is None or not a.option_strings or shown & {*a.option_strings}]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but reject unknown arguments, missing companions and mutually exclusive flags."""
        self._given: set[str] = set()
        for word in args or ():
            if word.startswith("-"):
                self._refuse_removed(word.split("=")[0])
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown and unknown[0].startswith("-"):
            self._unknown(unknown[0].split("=")[0], self._option_string_actions)
        if unknown:
            self.error(f"{unknown[0]!r} was not expected here")
        for flag, others in self.needs.items():
            if flag in self._given and self._given.isdisjoint(others):
                raise UserError(f"{flag} goes with {' or '.join(others)}: give both, or leave out {flag}")
        for one, other in self.apart:
            if self._given.issuperset((one, other)):
                raise UserError(f"{one} and {other} do not go together: leave out one of them")
        return parsed, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Parse one argument's values like argparse, but reject a path flag given twice: the first would be ignored."""
        if action.option_strings:
            flag = action.option_strings[0]
            if flag in self._given and isinstance(action.type, PathKind) and type(action) is argparse._StoreAction:
                self.error(f"{flag} was given twice")
            self._given.add(flag)
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Parse one value; Python's int and float would accept 1_0 and nan."""
        if action.type not in (int, float):
            return super()._get_value(action, arg_string)
        name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
        return convert(arg_string, action.type, name)

    def error(self, message: str) -> NoReturn:
        """Raise UserError; called by argparse for an invalid command line."""
        end = "" if message.endswith("?") else ";"
        raise UserError(f"{message}{end} {self.prog} --help lists what there is")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject an unknown command with the nearest name instead of a list of all."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self._unknown(value, action.choices)
        super()._check_value(action, value)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print like argparse, but let OSError (full disk, broken pipe) through, which argparse swallows."""
        (file or sys.stderr).write(message)

    def _unknown(self, word: str, names: Iterable[str]) -> NoReturn:
        self._refuse_removed(word)
        near = difflib.get_close_matches(word.replace("_", "-"), list(names), n=1, cutoff=0.5)
        self.error(f"{word} is unknown: did you mean {near[0]}?" if near else f"{word} is unknown")

    def _refuse_removed(self, word: str) -> None:
        if word in self.elsewhere:
            raise UserError(f"{word} is fairseq's: {self.elsewhere[word]}")
        if instead := _removed().get(self.prog, {}).get(word):
            self.error(f"{word} was removed: {instead}")


@functools.cache
def _removed() -> dict[str, dict[str, str]]:
    """Command -> removed flag or command -> its replacement."""
    return parse_yaml(Path(__file__).with_name("removed.yaml").read_bytes())


@dataclass(frozen=True)
class InRange:
    """Argument type: a number from `least` to `most`."""

    least: float
    most: float
    kind: type = int

    def __call__(self, text: str) -> float:
        """Parse the argument; raises ArgumentTypeError if it is not a number in the range."""
        try:
            value = int(text) if self.kind is int and WHOLE_NUMBER.fullmatch(text) else convert(text, self.kind, "")
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from None
        if not self.least <= value <= self.most:
            raise argparse.ArgumentTypeError(f"{text!r} was given, it must be from {self.least:,} to {self.most:,}")
        return value


THREADS = InRange(1, 1024)


def _layer_numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"--layers {text!r}: give numbers such as 1,4") from None


def add_model(parser: argparse.ArgumentParser, made_by: str = "fasttfm train") -> None:
    """Add MODEL and --checkpoint. made_by: the commands that create such a directory."""
    parser.add_argument("model", type=MODEL, metavar="MODEL", help=f"model directory made by {made_by}")
    add_checkpoint(parser)


def add_checkpoint(parser: argparse._ActionsContainer) -> None:
    """Add --checkpoint: the checkpoint to load from the model directory."""
    parser.add_argument(
        "--checkpoint",
        type=CHECKPOINT,
        default="best",
        metavar="WHICH",
        help="best, last, average, the number of an update, or the path of a checkpoint (default: %(default)s)",
    )


def add_data(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --data: a prepared data directory; required."""
    parser.add_argument("--data", type=LOADED_FOLDER, required=True, metavar="DATA", help=text)


def add_out(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add --out: the output directory; required."""
    parser.add_argument("--out", type=OUTPUT_FOLDER, required=True, metavar=metavar, help=text)


def add_downloads(parser: argparse.ArgumentParser) -> None:
    """Add --data-dir and --mirror: where dataset files are kept and downloaded from."""
    parser.add_argument(
        "--data-dir",
        type=SHARED_FOLDER,
        default=Path("data"),
        help="folder that keeps the downloads and text of datasets; files that are in DIR/downloads are not downloaded "
        "again (default: %(default)s)",
    )
    add_repeated(parser, "--mirror", "address that has the same files, tried before the official ones", metavar="URL")


def add_repeated(parser: argparse._ActionsContainer, flag: str, text: str, **options: Any) -> None:
    """Add a flag that may be repeated; its values form a list. text: its help."""
    parser.add_argument(flag, action="append", default=[], help=f"{text}; may be repeated", **options)


def add_attention_layers(parser: argparse._ActionsContainer) -> None:
    """Add --layers: the layers in a plot of attention weights."""
    text = "layers to draw, counted from 1, such as 1,4 (default: all)"
    parser.add_argument("--layers", type=_layer_numbers, metavar="N,N", help=text)


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")


def add_precision(parser: argparse.ArgumentParser, dest: str = "precision") -> None:
    """Add --precision: the dtype of weights and matrix products."""
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16", "int8"),
        dest=dest,
        help="type of weights and matrix products; int8 is for products on a CPU (default: fp32, or int8 for a "
        "quantized model)",
    )


def add_workers(parser: argparse.ArgumentParser, text: str, default: str = "auto", timed: bool = False) -> None:
    """Add --workers, the number of processes (None for auto). text: its help. timed: accept TIME as well."""
    words = ("auto", TIME) if timed else ("auto",)
    text, kind = f"{text} (default: %(default)s)", functools.partial(_worker_count, words)
    parser.add_argument("--workers", default=default, type=kind, metavar="|".join([*words, "N"]), help=text)


TIME = "time"
"""Value of --workers that asks for a measurement."""


def _worker_count(words: Sequence[str], text: str) -> int | str | None:
    """Parse --workers: a number of processes, None for auto, or TIME if it is one of the words."""
    if text in words:
        return None if text == "auto" else text
    if not WHOLE_NUMBER.fullmatch(text) or not 1 <= int(text) <= 1024:
        allowed = ", ".join(words)
        raise argparse.ArgumentTypeError(f"{text!r} was given, it must be {allowed} or a number from 1 to 1024")
    return int(text)
