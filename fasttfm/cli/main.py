"""`fasttfm <command>`: finds the command's file, runs it, and turns every expected failure into one line.

Each command is a module, here or of another distribution (fasttfm.config.kinds), with two functions:

    add_arguments(parser)    adds the command's arguments to its parser
    run(args)                does the work; returns an exit status or None for 0

or, for commands such as `fasttfm lm train`, with a table VERBS of such pairs (fasttfm.cli.verbs). Its docstring is what
the command's own --help begins with. Only the module of the command that was asked for is imported, so that
`fasttfm --help` needs neither torch nor time.
"""

import argparse
import errno
import functools
import importlib
import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from fasttfm.cli.completion import SHELLS, Completion
from fasttfm.cli.parser import Parser
from fasttfm.cli.paths import check_paths
from fasttfm.cli.verbs import add_verbs
from fasttfm.config import kinds
from fasttfm.errors import UserError, interrupted, is_out_of_memory
from fasttfm.system.machine import version
from fasttfm.system.memory import limit_remedy, refuse_small_limit
from fasttfm.system.signals import raise_dropped, stoppable

GROUPS = {
    "from text to a model": {
        "prepare": ("fasttfm.cli.prepare", "turn parallel text into a prepared data directory"),
        "train": ("fasttfm.cli.train", "train a Transformer on prepared data, or resume"),
        "average": ("fasttfm.cli.average", "average the last checkpoints of a model"),
        "recipe": ("fasttfm.cli.recipe", "run a published set-up from download to BLEU"),
    },
    "translations and scores": {
        "translate": ("fasttfm.cli.translate", "translate standard input, or score given translations"),
        "serve": ("fasttfm.cli.serve", "translate over HTTP"),
        "score": ("fasttfm.cli.score", "compute BLEU, chrF and TER; compare two systems"),
        "tokenize": ("fasttfm.cli.tokenize", "split text into a model's subwords, or join them"),
    },
    "models of other tools and sizes": {
        "export": ("fasttfm.cli.export", "write a model for CTranslate2, Hugging Face or onnxruntime"),
        "import": ("fasttfm.cli.import_", "convert another tool's model"),
        "quantize": ("fasttfm.cli.quantize", "convert a model's matrices to 8 bits"),
        "shortlist": ("fasttfm.cli.shortlist", "make a vocabulary map that speeds up translation"),
    },
    "language models": {name: ("", summary) for name, summary in kinds.COMMANDS.items()},
    "a look at runs and machines": {
        "plot": ("fasttfm.cli.plot", "draw curves of training runs, or attention weights"),
        "env": ("fasttfm.cli.env", "print versions and devices; check this machine or a folder"),
        "tune": ("fasttfm.cli.tune", "measure and keep this machine's fastest kernel settings"),
    },
}
"""Title -> command -> (module, the line that `fasttfm --help` shows); no module where fasttfm.config.kinds knows it."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

_PATH = """\
  fasttfm prepare --src train.en --tgt train.de --valid-src valid.en --valid-tgt valid.de --out DATA
  fasttfm train --preset multi30k --data DATA --out MODEL
  fasttfm translate MODEL < in.en > out.de
  fasttfm score --ref ref.de < out.de
"""

_LESS_MEMORY = {
    "train": "give a smaller --max-tokens (and a larger --update-freq), or a smaller model",
    "translate": "give a smaller --batch-tokens, --beam, --max-len-b or --max-source-length",
    "serve": "give a smaller model, --precision int8, or --max-tokens",
    "plot": "give a shorter sentence",
}
"""Command -> what makes it need less memory."""

_WITHOUT_TORCH = ("prepare", "score", "tokenize")

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 141  # what a shell reports for SIGPIPE


def main(argv: Sequence[str] | None = None, started: float | None = None) -> int:
    """Run one command; argv without the program's name, sys.argv when None. Returns the exit status.

    started: when the command began, by time.monotonic(); None: now.
    """
    started = time.monotonic() if started is None else started
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Only --help, --version and --completion may stand before the command: it is the first word, or there is none.
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    _standard_streams()
    with stoppable():
        return _answer(name, arguments, started)


def _answer(name: str | None, arguments: list[str], started: float) -> int:
    """Run the command and say how it failed or was stopped, in one line; returns the exit status."""
    try:
        status = _run(name, arguments, started)
        raise_dropped()
        return status
    except UserError as error:
        return _fail(_called(name, arguments), str(error), EXIT_USER_ERROR)
    except KeyboardInterrupt as interrupt:
        status = interrupted(interrupt)
        stopped = "interrupted" if status == 128 + signal.SIGINT else f"stopped by {signal.Signals(status - 128).name}"
        return _fail(_called(name, arguments), str(interrupt) or stopped, status)
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain once more when it closes stdout at exit.
        _discard_output()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        message = _told(name, error)
        if message is None:
            raise
        _give_up_output()
        return _fail(_called(name, arguments), message, EXIT_USER_ERROR)


def _called(name: str | None, arguments: list[str]) -> str:
    """Return what a command calls itself: its verb is known once its module is there."""
    verbs = {} if name is None else getattr(sys.modules.get(_module_of(name)), "VERBS", {})
    return " ".join(["fasttfm", *([] if name is None else [name]), *(each for each in arguments[1:2] if each in verbs)])


def _module_of(name: str) -> str:
    """Return the module of a command; '' where it is not installed."""
    return COMMANDS[name][0] or kinds.module_of(name)


def _told(name: str | None, error: Exception) -> str | None:
    """One line for a limit of the machine that the command has met; None for what is a bug."""
    if is_out_of_memory(error):
        less = _LESS_MEMORY.get(name or "") or kinds.less_memory(name)
        remedy = (less or "close other programs, or use a machine with more") + limit_remedy()
        return f"out of memory: {remedy} ({str(error).strip() or 'MemoryError'})"
    if isinstance(error, OSError) and error.errno is not None:  # None: raised by hand somewhere, which is a bug
        prefix = f"{error.filename}: " if error.filename else ""
        remedy = ": free some space, or write elsewhere" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{prefix}{error.strerror}{remedy}"
    return None


def _run(name: str | None, arguments: list[str], started: float) -> int:
    kinds.refuse_missing(arguments)
    parser = build_parser([] if name is None else [name])
    try:
        args = parser.parse_args(arguments, argparse.Namespace(arguments=arguments, started=started))
    except SystemExit:  # --help and --version have printed
        sys.stdout.flush()
        raise
    if name is None:
        parser.print_help(sys.stderr)
        return EXIT_USER_ERROR
    if name not in _WITHOUT_TORCH:
        refuse_small_limit()
    check_paths(args)
    with _warnings_in_a_line(_called(name, arguments)):
        status = args.run(args) or 0
    sys.stdout.flush()
    return status


@contextmanager
def _warnings_in_a_line(where: str) -> Iterator[None]:
    """Shows RuntimeWarning, which fasttfm's operators issue, without the place in the code that Python shows."""
    shown = warnings.showwarning

    def show(message, category, *place, **options):
        if category is RuntimeWarning:
            print(f"{where}: warning: {message}", file=sys.stderr, flush=True)
        else:
            shown(message, category, *place, **options)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def _standard_streams() -> None:
    """Python has None for a standard stream that the caller closed (<&-); the null device is as empty.

    What the terminal's encoding has no sign for, such as a file's name in another one, is written as an escape.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _give_up_output() -> None:
    """Drop what standard output did not take, which Python would try to write once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()


def build_parser(names: Collection[str]) -> Parser:
    """The parser with all commands listed and only those of `names` complete: their arguments say what to `run`."""
    parser = _CommandParser(
        prog="fasttfm", description="Train, run and score encoder-decoder Transformers on fused kernels."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions that matter and stop")
    whole = functools.partial(build_parser, COMMANDS)
    parser.add_argument("--completion", action=Completion, choices=SHELLS, const=whole, help="print a shell's script")
    subparsers = parser.add_subparsers(metavar="command", title="commands", parser_class=Parser)
    for name, (_, summary) in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary)
        if name in names and (module_name := _module_of(name)):
            module = importlib.import_module(module_name)
            command.description = module.__doc__
            if hasattr(module, "VERBS"):
                add_verbs(command, module.VERBS)
            else:
                module.add_arguments(command)
                command.set_defaults(run=module.run, parser=command)
    return parser


class _CommandParser(Parser):
    """Shows the shortest path from text to a score, then the commands by what they are for."""

    def format_help(self) -> str:
        width = max(map(len, COMMANDS)) + 2
        groups = (
            f"{title}:\n" + "".join(f"  {name.ljust(width)}{summary}\n" for name, (_, summary) in group.items())
            for title, group in GROUPS.items()
        )
        usage = "usage: fasttfm COMMAND ...    fasttfm COMMAND --help    fasttfm --version | --completion SHELL\n"
        return "\n".join([usage, f"{self.description}\n", _PATH, *groups])


class _Version(argparse.Action):
    """Reads installed versions without importing the packages."""

    def __call__(self, parser, namespace, values, option_string=None):
        for package in ("fasttfm", "torch", "triton", "sentencepiece", "sacrebleu"):
            print(package, version(package) or "(not installed)")
        parser.exit()


def _fail(where: str, message: str, status: int) -> int:
    with suppress(OSError):  # a full disk or a closed terminal takes no complaint either; the status tells
        print(f"{where}: {' '.join(message.splitlines())}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
