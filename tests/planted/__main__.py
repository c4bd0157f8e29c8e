"""Mutation tests: plants faults in a copy of the project, one at a time, and checks that the tests notice them.

    python -m tests.planted                     all faults of faults.yaml, with a record
    python -m tests.planted --room kernels      faults of some rooms, without a record
    python -m tests.planted --about mask        faults whose file or description has this word, without a record

Each fault replaces one piece of text in a copy of the tree; then the tests named with it run, with the cases of `make
test`. The record in benchmarks/results/planted.jsonl replaces that of the same processor. The exit status is 1 if a
fault was not noticed.
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
"""pytest in a process forked from one that has only torch loaded."""


@dataclass(frozen=True)
class Fault:
    """A piece of text, its replacement, and the tests that must notice."""

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
    """Copy tracked and untracked files, with hash-checked bytecode, to a folder."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    mode = py_compile.PycInvalidationMode.CHECKED_HASH  # a fault may keep size and timestamp
    compileall.compile_dir(folder, quiet=2, invalidation_mode=mode)


def is_noticed(fault: Fault, folder: Path) -> bool:
    """Return whether a test fails in the copy with the fault, which is removed afterwards.

    Raises CalledProcessError if the tests do not run.
    """
    file = folder / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file} has {text.count(fault.old)} times: {fault.old}"
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    path = os.pathsep.join(str(folder / part) for part in (".", "ptx-check/src", "pretraining/src"))
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FASTTFM_TESTS": "gate"}
    words = [sys.executable, "-c", _PYTEST, "-x", "-q", "-p", "no:cacheprovider", *fault.tests]
    try:
        options = {"cwd": folder, "env": {**os.environ, **variables}, "text": True}
        done = forked.run(words, popen=forked.BarePopen, capture_output=True, **options)
    finally:
        file.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1):  # 1: a test failed
        print(done.stdout[-2000:], file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, words)
    return done.returncode == 1


def plant(faults: Sequence[Fault]) -> Record:
    """Record fields for these faults; prints a line for each."""
    results = []
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        copy_tree(Path(name))
        for fault in faults:
            began = time.perf_counter()
            noticed = is_noticed(fault, Path(name))
            seconds = round(time.perf_counter() - began, 1)
            results.append({"room": fault.room, "breaks": fault.breaks, "noticed": noticed, "seconds": seconds})
            print(f"{'noticed' if noticed else 'MISSED':8} {seconds:6.1f} s  {fault.room}: {fault.breaks}", flush=True)
    return {"noticed": sum(result["noticed"] for result in results), "faults": results}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.planted", __doc__)
    rooms = sorted({fault.room for fault in FAULTS})
    parser.add_argument("--room", action="append", choices=rooms, help="may be repeated (default: all, with a record)")
    parser.add_argument("--about", metavar="WORD", help="faults whose file or description contains WORD")
    args = parser.parse_args(argv)
    about = args.about or ""
    record = plant([f for f in FAULTS if f.room in (args.room or rooms) and about in f"{f.file} {f.breaks}"])
    if args.room is args.about is None:
        command.keep(args.results, "planted", key=lambda record: record["machine"]["processor"], **record)
    print(f"{record['noticed']} of {len(record['faults'])} faults are noticed")
    return 0 if record["noticed"] == len(record["faults"]) else 1


if __name__ == "__main__":
    raise SystemExit(command.run(main))
