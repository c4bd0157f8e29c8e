"""Plants faults in a copy of the project, one at a time, and tells whether the tests notice each.

    python -m tests.planted                     every fault of faults.yaml, with a record
    python -m tests.planted --room kernels      those of one room, or several; nothing is recorded
    python -m tests.planted --about mask        those whose file, or what they break, has this word

A test suite that is made quicker must find what it found. Each fault replaces a piece of text in a copy of the tree,
never in the tree itself; of the tests only those run that are named with it, and of their cases those of `make test`.
The line in benchmarks/results/planted.jsonl takes the place of the one of this machine's processor. Ends with status 1
where a fault was not noticed.
"""

import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command
from benchmarks.measure import machine
from benchmarks.measure.records import Record
from fasttfm.system.parsing import parse_yaml
from tests import forked

ROOT = machine.ROOT
_PYTEST = "import os, sys, pytest; sys.dont_write_bytecode = True; sys.exit(pytest.main(sys.argv[1:]))"
"""Tests in a process that is forked from one with torch loaded, and nothing of the project."""


@dataclass(frozen=True)
class Fault:
    """A piece of text, what takes its place, and who must notice."""

    room: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


FAULTS = [
    Fault(**{**each, "tests": tuple(each["tests"])})
    for each in parse_yaml((Path(__file__).parent / "faults.yaml").read_bytes())
]


def copy_tree(folder: Path) -> None:
    """Copy the files that git has, or would take, into a folder, with bytecode that is compared with its source."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    mode = py_compile.PycInvalidationMode.CHECKED_HASH  # a fault may change neither size nor second
    compileall.compile_dir(folder, quiet=2, invalidation_mode=mode)


def is_noticed(fault: Fault, folder: Path) -> bool:
    """Return whether a test fails in a copy with the fault, which is taken out again.

    Raises CalledProcessError where the tests do not run at all.
    """
    file = folder / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file} has {text.count(fault.old)} times: {fault.old}"
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    places = os.pathsep.join(str(folder / place) for place in (".", "ptx-check/src", "pretraining/src"))
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": places, "FASTTFM_TESTS": "gate"}
    words = [sys.executable, "-c", _PYTEST, "-x", "-q", "-p", "no:cacheprovider", *fault.tests]
    try:
        pipe = subprocess.PIPE
        options = {"cwd": folder, "env": {**os.environ, **variables}, "text": True}
        done = forked.run(words, popen=forked.BarePopen, stdout=pipe, stderr=pipe, **options)
    finally:
        file.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1):  # 1: a test has failed
        print(done.stdout[-2000:], file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, words)
    return done.returncode == 1


def plant(faults: Sequence[Fault]) -> Record:
    """The fields of the record of these faults; says a line for each."""
    told = []
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        copy_tree(Path(name))
        for fault in faults:
            began = time.perf_counter()
            noticed = is_noticed(fault, Path(name))
            seconds = round(time.perf_counter() - began, 1)
            told.append({"room": fault.room, "breaks": fault.breaks, "noticed": noticed, "seconds": seconds})
            print(f"{'noticed' if noticed else 'MISSED':8} {seconds:6.1f} s  {fault.room}: {fault.breaks}", flush=True)
    return {"noticed": sum(each["noticed"] for each in told), "faults": told}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.planted", __doc__)
    rooms = sorted({fault.room for fault in FAULTS})
    parser.add_argument("--room", action="append", choices=rooms, help="one, or several (default: all, with a record)")
    parser.add_argument("--about", metavar="WORD", help="those whose file, or what they break, has it")
    args = parser.parse_args(argv)
    chosen = [each for each in FAULTS if args.room is None or each.room in args.room]
    if args.about is not None:
        chosen = [each for each in chosen if args.about in f"{each.file} {each.breaks}"]
    record = plant(chosen)
    if args.room is args.about is None:
        command.keep(args.results, "planted", key=lambda record: record["machine"]["processor"], **record)
    print(f"{record['noticed']} of {len(record['faults'])} faults are noticed")
    return 0 if record["noticed"] == len(record["faults"]) else 1


if __name__ == "__main__":
    raise SystemExit(command.run(main))
