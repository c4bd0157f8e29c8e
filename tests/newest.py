"""The rooms that other packages' versions reach, with the versions that this Python has: what broke, in a table.

    python -m tests.newest            # in the environment that `make newest` makes, which has the newest

Each room runs its part of the gate; a test file that cannot be imported counts as a case that fails. Status 1 where one
failed. The line in benchmarks/results/newest.jsonl takes the place of the one of the same versions.
"""

import os
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from benchmarks.measure.records import Record
from benchmarks.measure.text_table import markdown
from fasttfm.system.machine import version
from tests.pytest_runs import counted

ROOMS: dict[str, list[str]] = {
    "functional": ["tests/functional"],
    "nn": ["tests/nn"],
    "convert": ["tests/convert"],
    "compat": ["tests/compat"],
    "ptx-check": ["ptx-check/tests", "--ignore=ptx-check/tests/kernels"],
    "ptx-check, kernels": ["ptx-check/tests/kernels"],
}
COMPILED = {"ptx-check, kernels"}
"""Rooms for which Triton must not be in its interpreter."""
PACKAGES = ("torch", "triton", "transformers", "onnxruntime", "onnx", "numpy", "numba", "pytest")


def versions_of(record: Record) -> Any:
    """What tells records apart."""
    return tuple(sorted(record["versions"].items()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.newest", __doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    args = parser.parse_args(argv)
    rooms = []
    for room, tests in ROOMS.items():
        variables = {"FASTTFM_TESTS": "gate"} | ({"TRITON_INTERPRET": "0"} if room in COMPILED else {})
        rooms.append(counted(["--continue-on-collection-errors", *tests], args.workers, variables, room=room))
    versions = {name: found for name in PACKAGES if (found := version(name)) is not None}
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    rows = [(each["room"], f"{each['passed']:,} of {each['cases']:,}", str(len(each["failed"]))) for each in rooms]
    print(markdown(("room", "pass", "fail"), rows, names=1))
    for each in rooms:
        print(*(f"  {each['room']}: {case}" for case in each["failed"]), sep="\n", end="\n" * bool(each["failed"]))
    command.keep(args.results, "newest", key=versions_of, versions=versions, rooms=rooms, workers=args.workers)
    return 1 if any(each["failed"] for each in rooms) else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
