"""Begin and end of a benchmark's program: its flags, the commands it runs, its record, its exit status."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.measure.records import RESULTS, SCHEMAS
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError, interrupted


def parser(name: str, docstring: str | None) -> Parser:
    """The parser of `python -m benchmarks.NAME`, which says the first line of its docstring, with --results."""
    result = Parser(prog=f"python -m benchmarks.{name}", description=(docstring or "").split("\n")[0])
    result.add_argument("--results", type=Path, default=RESULTS, help="folder that keeps the record")
    return result


Flag = tuple[tuple[str, ...], dict[str, Any]]


def flag(*names: str, **options: Any) -> Flag:
    """Return the arguments for argparse's add_argument()."""
    return names, options


def minutes(default: float, of: str) -> Flag:
    """--minutes of each training."""
    return flag("--minutes", type=float, default=default, help=f"of each {of} (default: %(default)s)")


def rounds(default: int, of: str) -> Flag:
    """--rounds in which ways take turns."""
    return flag("--rounds", type=int, default=default, help=f"turns of {of} (default: %(default)s)")


def vocab_size(default: int) -> Flag:
    """--vocab-size of the text."""
    return flag("--vocab-size", type=int, default=default, help="subwords (default: %(default)s)")


TEXTS = flag("--text", type=Path, nargs="+", required=True, help="plain text, or packed; a document each")
IMAGES = flag("--images", type=Path, default=machine.ROOT / "docs" / "images", help="folder of the figure")


def program(
    *flags: Flag, rest: bool = False
) -> Callable[[Callable[[Any], Mapping[str, Any]]], Callable[[Sequence[str] | None], int]]:
    """Makes main(argv) of a function that measures: from its arguments to what the record says beside them.

    Its module's docstring is the program's. The arguments get `folder`, a temporary one, and with `rest` also `more`,
    what follows --. Fields of the record's schema that the function leaves out are arguments of the same name.
    """

    def decorate(measure: Callable[[Any], Mapping[str, Any]]) -> Callable[[Sequence[str] | None], int]:
        name = Path(measure.__globals__["__file__"]).stem

        def main(argv: Sequence[str] | None = None) -> int:
            given, more = split(argv) if rest else (argv, [])
            reader = parser(name, measure.__globals__["__doc__"])
            for names, options in flags:
                reader.add_argument(*names, **options)
            args = reader.parse_args(given)
            with tempfile.TemporaryDirectory() as folder:
                args.folder, args.more = Path(folder), more
                found = measure(args)
            told = {key: _without_folders(value) for key, value in vars(args).items()}
            keep(
                args.results,
                name,
                **{key: told[key] for key in SCHEMAS[name]["properties"] if key in told} | dict(found),
            )
            return 0

        return main

    return decorate


def _without_folders(value: Any) -> Any:
    """Files by their names: folders are a machine's."""
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return value.name if isinstance(value, Path) else value


def split(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The arguments before --, and those after it, which go to another program; None: this process's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def forget_folders() -> None:
    """Has this process's arguments, which records repeat, name a folder by its last part: the rest is a machine's."""
    sys.argv[1:] = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]


def keep(results: Path, benchmark: str, **fields: Any) -> dict[str, Any]:
    """Append a record of these fields and the machine to the file of a benchmark in a folder; returns it."""
    record = {"benchmark": benchmark, **fields, "machine": machine.describe()}
    append(results / f"{benchmark.replace('_', '-')}.jsonl", record)
    return record


def append(file: Path, record: dict[str, Any]) -> None:
    """Add a record as a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def in_turns(ways: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Way -> its seconds in every round, and way -> its last answer; the ways take turns, the first is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers = {}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            begin = time.perf_counter()
            answers[name] = run()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds, answers


def for_minutes(minutes: float) -> tuple[object, ...]:
    """The flags of a training that ends when its time is over, at a constant rate."""
    return ("--schedule", "constant", "--max-update", 10**9, "--max-minutes", minutes)


def python(*words: object) -> str:
    """Return what `python -m WORDS` prints, with the threads it takes by itself; SystemExit with its complaint."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    line = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks: {' '.join(line)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def train(*words: object, out: Path) -> list[dict[str, Any]]:
    """Train by `fasttfm WORDS` into out, without a pause to validate or save; what its log says of every update."""
    from fasttfm.checkpoints.run_log import read_log

    quiet = ("--no-tensorboard", "--valid-interval-updates", 0, "--save-interval-updates", 0, "--log-interval", 1)
    python("fasttfm", *words, "--out", out, *quiet)
    return [record for record in read_log(out) if record["kind"] == "train"]


def timed_training(*words: object, out: Path, minutes: float) -> dict[str, Any]:
    """Train by `fasttfm WORDS` into out: tokens/s of the second half of the updates, because new shapes take time.

    Also the number of updates and the peak memory of one process in bytes.
    """
    updates = train(*words, "--max-minutes", minutes, out=out)
    late = updates[len(updates) // 2 :]
    seconds = sum(record["target_tokens"] / record["tokens_per_second"] for record in late)
    return {
        "tokens_per_second": sum(record["target_tokens"] for record in late) / seconds,
        "updates": updates[-1]["step"],
        "peak_memory": updates[-1]["peak_memory"],
    }


def run(main: Callable[[Sequence[str] | None], int], arguments: Sequence[str] | None = None) -> int:
    """main(arguments): its status; 2 with the message on stderr for what the user must change."""
    try:
        return main(arguments)
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: interrupted; the cases before this one are kept", file=sys.stderr)
        return interrupted()
