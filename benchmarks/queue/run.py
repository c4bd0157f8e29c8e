"""Runs prepared questions on a GPU that is available for minutes.

    python -m benchmarks queue --dry-run                     list the questions and their time limits
    python -m benchmarks queue --seconds 700                 run them, most valuable first
    python -m benchmarks queue --prepare FOLDER              compile and pack beforehand what needs no device

Each question runs in its own process with its own time limit. Its record is written to queue-MACHINE.jsonl when it
ends; a killed run loses only the current question, and keeps the records that its command has written. An answered
question is skipped until the files it measures change; a question is skipped if its limit exceeds the remaining time.
Questions are in questions.yaml, predictions and outcomes in docs/gpu-predictions.md.
"""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks import command
from benchmarks.measure import machine, records
from benchmarks.measure.machine import ROOT, machine_name
from benchmarks.measure.records import RESULTS, Record
from benchmarks.measure.text_table import markdown, number, replaced
from benchmarks.queue import prepare
from benchmarks.queue.questions import Question, digest, outcomes, read
from fasttfm.cli.parser import InRange, Parser
from fasttfm.errors import UserError
from fasttfm.kernels.proof.assembler import in_use

_KEPT_OUTPUT = 2_000
"""Characters of output kept in a record."""
SOURCES = (ROOT, ROOT / "ptx-check" / "src", ROOT / "pretraining" / "src")
PAGE = ROOT / "docs" / "gpu-predictions.md"
_BEGIN, _END = "<!-- queue -->\n", "<!-- end of queue -->\n"


def words(question: Question, results: Path, prepared: Path | None) -> list[str]:
    line = question.command.replace("{results}", shlex.quote(str(results)))
    line = line.replace("{prepared}", shlex.quote(str(prepared or "")))
    first, *others = shlex.split(line)
    return [sys.executable if first == "python" else first, *others]


def environment(prepared: Path | None, cache: Path) -> dict[str, str]:
    """Environment of a question: this checkout, prepared kernels, every test case, tuning results from `cache` only."""
    path = [*map(str, SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = {**os.environ, **prepare.CASES, "PYTHONPATH": os.pathsep.join(path), "FASTTFM_CACHE": str(cache)}
    if prepared is not None:
        result["TRITON_CACHE_DIR"] = str(prepared / "kernels")
    return result


def load(results: Path, names: str = "queue-*") -> list[Record]:
    """Records of the files in a folder that match a pattern."""
    return [record for file in sorted(results.glob(names + records.ENDING)) for record in records.read(file)]


def ask(question: Question, results: Path, prepared: Path | None, seconds: float) -> Record:
    """Run a question's command with a time limit, and keep its record."""
    moment, began = datetime.now(timezone.utc).isoformat(timespec="seconds"), time.monotonic()
    before = prepare.compiled(prepared)
    with tempfile.TemporaryDirectory() as folder:
        tunes = question.command.startswith("python -m fasttfm tune")
        cache, output = results / "cache" if tunes else Path(folder) / "cache", Path(folder) / "output"
        line = words(question, results, prepared)
        status = command.limited(line, seconds, environment(prepared, cache), output).returncode
        elapsed, text = time.monotonic() - began, output.read_text(encoding="utf-8", errors="replace")
    written = [r for r in load(results, "*") if r.get("machine", {}).get("time", "") >= moment]
    record: Record = {
        "benchmark": "queue",
        "question": question.name,
        "status": "done" if status == 0 else "stopped" if status in command.AT_ITS_LIMIT else "failed",
        "seconds": round(elapsed, 1),
        "limit": question.seconds,
        "measures": digest(question),
        "answers": outcomes(question, (r for r in written if r.get("benchmark") != "queue"), text),
        "compiled": [] if before is None else sorted((prepare.compiled(prepared) or before) - before),
        "output": text[-_KEPT_OUTPUT:],
        "machine": machine.describe(),
    }
    records.write(results / records.file_name("queue", record["machine"]), [record], lambda record: record["question"])
    return record


def answered(question: Question, known: Sequence[Record]) -> Record | None:
    """The record with all numbers of a question, measured on the current files; None if there is none."""
    for record in known:
        if record["question"] == question.name and record["measures"] == digest(question):
            return None if any(answer["measured"] is None for answer in record["answers"]) else record
    return None


def run(
    questions: Sequence[Question],
    seconds: float,
    *,
    results: Path = RESULTS,
    prepared: Path | None = None,
    dry: bool = False,
    again: bool = False,
) -> list[Record]:
    """Run the questions in order within `seconds`, and print their outcomes. dry: only print the plan."""
    began = time.monotonic()
    file = results / records.file_name("queue", machine.describe())
    known = records.read(file) if file.is_file() else []
    result, planned = [], 0.0
    for question in questions:
        left = seconds - (planned if dry else time.monotonic() - began)
        answer = None if again else answered(question, known)
        if answer is not None:
            print(f"{question.name}: answered on {answer['machine']['time'][:10]}")
        elif question.needs and not (prepared and (prepared / question.needs).exists()):
            print(f"{question.name}: skipped, {question.needs} is not prepared (--prepared FOLDER)")
        elif question.seconds > left:
            print(f"{question.name}: skipped, its limit is {question.seconds} s and {max(0, left):.0f} s are left")
        elif dry:
            planned += question.seconds
            print(f"{question.name}: {question.decides} (limit {question.seconds} s)\n    {question.command}")
        else:
            print(f"{question.name}: {question.decides}", flush=True)
            record = ask(question, results, prepared, min(question.seconds, left))
            result.append(record)
            print(f"    {record['status']} after {record['seconds']} s")
            if late := record["compiled"]:
                print(f"    error: {len(late)} kernels were not prepared: {', '.join(late)}")
            if record["status"] == "failed":
                print("    " + record["output"].strip()[-400:].replace("\n", "\n    "))
    if dry:
        print(f"{planned:.0f} of {seconds:.0f} s planned")
    elif result:
        print(table(result), f"kept in {file}", sep="\n")
    return result


def table(asked: Sequence[Record]) -> str:
    """Table of the numbers in these records: predicted, measured, verdict."""
    rows = []
    for record in asked:
        for a in record["answers"]:
            values = [number(a[name]) if a[name] is not None else "-" for name in ("before", "predicted", "measured")]
            verdict = a["verdict"] + (f" ({a['why']})" if a["why"] else "")
            rows.append([record["question"], f"{a['what']}, {a['unit']}", *values, verdict])
    return markdown(["question", "number", "before", "predicted", "measured", "verdict"], rows)


def page_table(questions: Sequence[Question], known: Sequence[Record]) -> str:
    """Table of all numbers that are asked for: prediction, and last outcome on each machine."""
    rows = []
    for question in questions:
        for expected in question.answers:
            before = "" if expected.before is None else number(expected.before)
            outcomes = [
                f"{number(a['measured'])} ({machine_name(r['machine'])}, {r['machine']['time'][:10]}): {a['verdict']}"
                for r in known
                for a in r["answers"]
                if r["question"] == question.name and a["what"] == expected.what and a["measured"] is not None
            ]
            numbers = [f"{expected.what}, {expected.unit}", before, number(expected.predicted)]
            rows.append([question.name, *numbers, "; ".join(outcomes) or "not asked yet"])
    return markdown(["Question", "Number", "Before", "Predicted", "Outcome"], rows)


def write_page(results: Path) -> None:
    """Write page_table() of a folder's records into the page. Raises UserError if the folder does not exist."""
    if not results.is_dir():
        raise UserError(f"--results {results} does not exist: give a folder of records")
    content = f"\n{page_table(read(), load(results))}\n\n"
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), _BEGIN, _END, content), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmarks queue", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=InRange(1, 10**6, float), default=700.0, help="device time (default: 700)")
    parser.add_argument("--only", default="", metavar="WORD", help="questions whose name contains WORD")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="list the questions and their limits")
    mode.add_argument("--page", action="store_true", help=f"write predictions and outcomes to {PAGE.name}")
    mode.add_argument("--prepare", type=Path, metavar="FOLDER", help="compile kernels and pack them into FOLDER")
    parser.add_argument("--again", action="store_true", help="also run answered questions")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="unpacked archive of --prepare")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    prepare.add_arguments(parser)
    args = parser.parse_args(argv)
    questions = [question for question in read() if args.only in question.name]
    if not questions:
        raise UserError(f"--only {args.only} matches no question: {', '.join(question.name for question in read())}")
    if args.page:
        write_page(args.results)
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
    """Raises UserError without a GPU or a C compiler; prints the assembler in use."""
    if not torch.cuda.is_available():
        raise UserError("the queue needs a CUDA or ROCm device: without one use --dry-run or --prepare")
    if torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        print(in_use(10 * major + minor))
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise UserError("Triton needs a C compiler at its first launch: install gcc")


if __name__ == "__main__":
    sys.exit(command.run(main))
