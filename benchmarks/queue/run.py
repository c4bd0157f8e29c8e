"""Asks a GPU that is at hand for minutes what it was prepared to be asked.

    python -m benchmarks queue --dry-run                     what would be asked, for how long
    python -m benchmarks queue --seconds 700                 asks, most worth first
    python -m benchmarks queue --prepare FOLDER              compiles and packs what no device second should go into

Each question is a process of its own with its own limit. Its record is written as it ends, into queue-MACHINE.jsonl:
a run that is killed loses the question that it was at, less the records that this one's command had written. A question
that a record answers is not asked again before the files that it measures have changed; one that the rest of the time
cannot hold is left out. questions.yaml has the questions, docs/gpu-predictions.md their predictions and outcomes.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import command
from benchmarks.measure import machine, records
from benchmarks.measure.machine import ROOT
from benchmarks.measure.records import RESULTS, Record
from benchmarks.measure.text_table import markdown, number
from benchmarks.queue import page, prepare
from benchmarks.queue.questions import Question, digest, outcomes, read
from fasttfm.cli.parser import InRange, Parser
from fasttfm.errors import UserError
from fasttfm.kernels.proof.assembler import in_use
from fasttfm.system.children import ask_for_parents_end, child_environment

_GRACE = 10.0
"""Seconds that a question has to write what it found, when its limit has come."""
_KEPT_OUTPUT = 2_000
"""Characters of its output that a record keeps."""
SOURCES = (ROOT, ROOT / "ptx-check" / "src", ROOT / "pretraining" / "src")


def words(question: Question, results: Path, prepared: Path | None) -> list[str]:
    """The command line of a question."""
    line = question.command.replace("{results}", shlex.quote(str(results)))
    line = line.replace("{prepared}", shlex.quote(str(prepared or "")))
    first, *others = shlex.split(line)
    return [sys.executable if first == "python" else first, *others]


def environment(prepared: Path | None, cache: Path) -> dict[str, str]:
    """The variables of a question's process: this checkout, the compiled kernels, no tuned choices but in `cache`."""
    path = [*map(str, SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = {**child_environment(), "PYTHONPATH": os.pathsep.join(path), "FASTTFM_CACHE": str(cache)}
    if prepared is not None:
        result["TRITON_CACHE_DIR"] = str(prepared / "kernels")
    return result


def _run(line: list[str], limit: float, environment: dict[str, str], output: Path) -> tuple[str, float]:
    """(how it ended: done, stopped or failed; seconds) of a command, its output in a file."""
    began = time.monotonic()
    try:
        with output.open("wb") as sink:
            process = subprocess.Popen(
                line, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=ask_for_parents_end,
            )  # fmt: skip
    except OSError as error:
        output.write_text(f"{line[0]}: {error.strerror}")
        return "failed", 0.0
    stopped = False
    try:
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            stopped = True
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - began
    return "stopped" if stopped else "failed" if process.returncode else "done", seconds


def _since(results: Path, moment: str) -> list[Record]:
    """The records that were written from a time on, of all files of a folder."""
    found = [record for file in sorted(results.glob(f"*{records.ENDING}")) for record in records.read(file)]
    return [r for r in found if r.get("machine", {}).get("time", "") >= moment and r.get("benchmark") != "queue"]


def ask(question: Question, results: Path, prepared: Path | None, seconds: float) -> Record:
    """Runs a question's command for at most so many seconds, and keeps what came out."""
    moment = datetime.now(timezone.utc).isoformat(timespec="seconds")
    had = prepare.compiled(prepared)
    with tempfile.TemporaryDirectory() as folder:
        tunes = question.command.startswith("python -m fasttfm tune")
        cache, output = results / "cache" if tunes else Path(folder) / "cache", Path(folder) / "output"
        status, taken = _run(words(question, results, prepared), seconds, environment(prepared, cache), output)
        text = output.read_text(encoding="utf-8", errors="replace")
    found = outcomes(question, _since(results, moment), text)
    record: Record = {
        "benchmark": "queue",
        "question": question.name,
        "status": status,
        "seconds": round(taken, 1),
        "limit": question.seconds,
        "measures": digest(question),
        "answers": [each.record() for each in found],
        "compiled": [] if had is None else sorted((prepare.compiled(prepared) or had) - had),
        "output": text[-_KEPT_OUTPUT:],
        "machine": machine.describe(),
    }
    records.write(results / _file(record["machine"]), [record], lambda record: record["question"])
    return record


def _file(described: Record) -> str:
    return records.file_name("queue", described)


def answered(question: Question, known: Sequence[Record]) -> Record | None:
    """The record that answers a question: all its numbers, with what it measures as it is now."""
    of = next((record for record in known if record["question"] == question.name), None)
    if of is None or of["measures"] != digest(question) or any(a["measured"] is None for a in of["answers"]):
        return None
    return of


def run(
    questions: Sequence[Question],
    seconds: float,
    *,
    results: Path = RESULTS,
    prepared: Path | None = None,
    dry: bool = False,
    again: bool = False,
    tell: Callable[[str], None] = print,
) -> list[Record]:
    """Asks the questions in order while the time lasts, and says what came out; dry: says what would be asked."""
    began = time.monotonic()
    file = results / _file(machine.describe())
    known = records.read(file) if file.is_file() else []
    result, planned = [], 0.0
    for question in questions:
        left = seconds - (planned if dry else time.monotonic() - began)
        of = None if again else answered(question, known)
        if of is not None:
            tell(f"{question.name}: answered on {of['machine']['time'][:10]}")
        elif question.needs and not (prepared and (prepared / question.needs).exists()):
            tell(f"{question.name}: left out, {question.needs} is not prepared (--prepared FOLDER)")
        elif question.seconds > left:
            tell(f"{question.name}: left out, it may take {question.seconds} s and {max(0, left):.0f} s are left")
        elif dry:
            planned += question.seconds
            tell(f"{question.name}: {question.decides} (at most {question.seconds} s)\n    {question.command}")
        else:
            tell(f"{question.name}: {question.decides}")
            record = ask(question, results, prepared, min(question.seconds, left))
            result.append(record)
            tell(f"    {record['status']} after {record['seconds']} s")
            if record["compiled"]:
                tell(f"    fault: {len(record['compiled'])} kernels were not prepared: {', '.join(record['compiled'])}")
            if record["status"] == "failed":
                tell("    " + record["output"].strip()[-400:].replace("\n", "\n    "))
    if dry:
        tell(f"{planned:.0f} of {seconds:.0f} s at most")
    elif result:
        tell(table(result))
        tell(f"kept in {file}")
    return result


def table(asked: Sequence[Record]) -> str:
    """A line for each number: predicted, measured, verdict."""
    rows = []
    for record in asked:
        for a in record["answers"]:
            values = [number(a[name]) if a[name] is not None else "-" for name in ("before", "predicted", "measured")]
            said = a["verdict"] + (f" ({a['why']})" if a["why"] else "")
            rows.append([record["question"], f"{a['what']}, {a['unit']}", *values, said])
    return markdown(["question", "number", "before", "predicted", "measured", "verdict"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmarks queue", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=InRange(1, 10**6, float), default=700.0, help="of the device (default: 700)")
    parser.add_argument("--only", default="", metavar="WORD", help="questions whose name contains it")
    parser.add_argument("--dry-run", action="store_true", help="say what would be asked, and for how long")
    parser.add_argument("--again", action="store_true", help="ask what a record answers, too")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="what --prepare made, unpacked")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--page", action="store_true", help=f"write predictions and outcomes into {page.PAGE.name}")
    prepare.add_arguments(parser)
    args = parser.parse_args(argv)
    questions = [question for question in read() if args.only in question.name]
    if not questions:
        raise UserError(f"--only {args.only}: no question is called so; they are {', '.join(q.name for q in read())}")
    if bool(args.page) + bool(args.dry_run) + (args.prepare is not None) > 1:
        parser.error("--page, --dry-run and --prepare do not go together")
    if args.page:
        page.write(read(), args.results)
        return 0
    if args.prepare is not None:
        return prepare.main(args, questions)
    prepared = args.prepared and args.prepared.resolve()
    if prepared is not None:
        prepare.relocate(prepared)
    if not args.dry_run:
        _require_device()
        command.writable(args.results, "--results")
    asked = run(
        questions, args.seconds, results=args.results.resolve(), prepared=prepared, dry=args.dry_run, again=args.again
    )
    return 1 if any(record["compiled"] for record in asked) else 0


def _require_device() -> None:
    """Raises UserError where there is none; says which assembler makes its machine code."""
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA or ROCm device to ask: --dry-run and --prepare need none")
    if torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        print(in_use(10 * major + minor))
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise UserError("Triton needs a C compiler at its first launch: install gcc")


if __name__ == "__main__":
    sys.exit(command.run(main))
