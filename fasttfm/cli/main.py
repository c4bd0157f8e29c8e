"""Entry point of `fasttfm COMMAND`: imports the command's module, runs it, reports expected failures in one line.

A command is a module, here or in another distribution (fasttfm.config.kinds), with two functions:

    add_arguments(parser)    adds the command's arguments
    run(args)                does the work; returns the exit status, None for 0

Commands with verbs, such as `fasttfm lm train`, have a table VERBS instead (fasttfm.cli.verbs). The module's docstring
opens the command's --help. Only the requested command is imported, so `fasttfm --help` is fast and needs no torch.
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
"""Title -> command -> (module, summary in `fasttfm --help`); the module is empty if fasttfm.config.kinds names it."""

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
"""Command -> how to reduce its memory use."""

_WITHOUT_TORCH = ("prepare", "score", "tokenize")

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 141  # what a shell reports for SIGPIPE


def main(argv: Sequence[str] | None = None, started: float | None = None) -> int:
    """Run one command and return its exit status. argv: without the program name; None: sys.argv.

    started: start time of the command by time.monotonic(); None: now.
    """
    started = time.monotonic() if started is None else started
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Only --help, --version and --completion may precede a command: the command is the first word, or there is none.
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    _standard_streams()
    with stoppable():
        try:
            status = _run(name, arguments, started)
            raise_dropped()
            return status
        except UserError as error:
            return _fail(name, arguments, str(error))
        except KeyboardInterrupt as interrupt:
            status = interrupted(interrupt)
            is_ctrl_c = status == 128 + signal.SIGINT
            default = "interrupted" if is_ctrl_c else f"stopped by {signal.Signals(status - 128).name}"
            return _fail(name, arguments, str(interrupt) or default, status)
        except BrokenPipeError:  # the reader (head, less) is gone
            _discard_output()
            return EXIT_BROKEN_PIPE
        except Exception as error:
            message = _limit_message(name, error)
            if message is None:
                raise
            try:
                sys.stdout.flush()
            except OSError:
                _discard_output()
            return _fail(name, arguments, message)


def _full_name(name: str | None, arguments: list[str]) -> str:
    """Return `fasttfm COMMAND VERB`; the verb is known once the command's module is imported."""
    verbs = {} if name is None else getattr(sys.modules.get(_module_of(name)), "VERBS", {})
    return " ".join(["fasttfm", *([] if name is None else [name]), *(word for word in arguments[1:2] if word in verbs)])


def _module_of(name: str) -> str:
    """Return the module of a command; '' if it is not installed."""
    return COMMANDS[name][0] or kinds.module_of(name)


def _limit_message(name: str | None, error: Exception) -> str | None:
    """Return a one-line message if the machine reached a limit (memory, disk, permissions); None for a bug."""
    if is_out_of_memory(error):
        less = _LESS_MEMORY.get(name or "") or kinds.less_memory(name)
        remedy = (less or "close other programs, or use a machine with more") + limit_remedy()
        return f"out of memory: {remedy} ({str(error).strip() or 'MemoryError'})"
    if isinstance(error, OSError) and error.errno is not None:  # without errno it was raised by our code: a bug
        prefix = f"{error.filename}: " if error.filename else ""
        remedy = ": free some space, or write elsewhere" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{prefix}{error.strerror}{remedy}"
    return None


def _run(name: str | None, arguments: list[str], started: float) -> int:
    kinds.refuse_missing(arguments)
    parser = build_parser([] if name is None else [name])
    try:
        args = parser.parse_args(arguments, argparse.Namespace(arguments=arguments, started=started))
    except SystemExit:  # after --help or --version
        sys.stdout.flush()
        raise
    if name is None:
        parser.print_help(sys.stderr)
        return EXIT_USER_ERROR
    if name not in _WITHOUT_TORCH:
        refuse_small_limit()
    check_paths(args)
    with _one_line_warnings(_full_name(name, arguments)):
        status = args.run(args) or 0
    sys.stdout.flush()
    return status


@contextmanager
def _one_line_warnings(where: str) -> Iterator[None]:
    """Print RuntimeWarning, which fasttfm's operators issue, without the source location that Python adds."""
    default = warnings.showwarning

    def show(message, category, *location, **options):
        if category is RuntimeWarning:
            print(f"{where}: warning: {message}", file=sys.stderr, flush=True)
        else:
            default(message, category, *location, **options)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = default


def _standard_streams() -> None:
    """Open the null device for closed standard streams (<&-), and escape characters that stdout cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Send buffered output to the null device: Python flushes stdout again at exit, and would report the failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser(names: Collection[str]) -> Parser:
    """Return a parser that lists all commands and has the arguments of `names` only; args.run executes the command."""
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
    """Top-level help: the shortest path from text to a score, then the commands grouped by purpose."""

    def format_help(self) -> str:
        width = max(map(len, COMMANDS)) + 2
        groups = (
            f"{title}:\n" + "".join(f"  {name.ljust(width)}{summary}\n" for name, (_, summary) in group.items())
            for title, group in GROUPS.items()
        )
        usage = "usage: fasttfm COMMAND ...    fasttfm COMMAND --help    fasttfm --version | --completion SHELL\n"
        return "\n".join([usage, f"{self.description}\n", _PATH, *groups])


class _Version(argparse.Action):
    """Prints installed versions without importing the packages."""

    def __call__(self, parser, namespace, values, option_string=None):
        for package in ("fasttfm", "torch", "triton", "sentencepiece", "sacrebleu"):
            print(package, version(package) or "(not installed)")
        parser.exit()


def _fail(name: str | None, arguments: list[str], message: str, status: int = EXIT_USER_ERROR) -> int:
    with suppress(OSError):  # stderr may be a full disk or a closed terminal; the status still reports the failure
        print(f"{_full_name(name, arguments)}: {' '.join(message.splitlines())}", file=sys.stderr, flush=True)
    return status
