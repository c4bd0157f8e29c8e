"""The machine code of every kernel on sm_90, by each assembler, executed on a CPU and compared with the PTX.

    python -m tests.executed.machine_code                        every launch of the cases of tests/executed
    python -m tests.executed.machine_code --tuned                also each tile that `fasttfm tune` may choose
    python -m tests.executed.machine_code --ptxas FILE -k bf16   an additional assembler; only some cases

Writes a line per kernel, tile, dtype, head size and assembler to benchmarks/results/machine-code.jsonl, and the table
of docs/assemblers.md. An interrupted run can be resumed. Exit status 1 if machine code is wrong.
"""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from triton import knobs

from benchmarks import command
from benchmarks.measure import machine, records, text_table
from fasttfm.kernels import choice_cache
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import matrix
from ptx_check.machine_code.compared import version
from tests.executed.assembled import CHIP, by_tile, named, width_of
from tests.pytest_runs import run_tests

NAMES = "test_kernels.py", "test_search.py", "test_hopper.py"
TESTS = [str(machine.ROOT / "tests" / "executed" / name) for name in NAMES]
PAGE = machine.ROOT / "docs" / "assemblers.md"
_OTHER_WARPS = 8
"""Warps of a kernel with a producer and two consumers, in addition to those of the tile."""
BEGIN, END = "<!-- machine code: python -m tests.executed.machine_code -->", "<!-- end of machine code -->"


def assemblers() -> dict[str, str]:
    """Version -> path, newest last: Triton's two assemblers, and those on the PATH and in /usr/local."""
    found = [Path(knobs.nvidia.ptxas.path)]
    found += [found[0].with_name("ptxas-blackwell"), *map(Path, filter(None, [shutil.which("ptxas")]))]
    found += Path("/usr/local").glob("cuda*/bin/ptxas")
    result: dict[str, str] = {}
    for path in filter(Path.is_file, found):
        result.setdefault(version(str(path)), str(path))
    result.pop("unknown", None)
    return dict(sorted(result.items(), key=lambda item: [int(n) for n in item[0].split(".")]))


def found_file() -> Path:
    """The file of results so far, in the user's cache folder."""
    return choice_cache.folder() / "executed" / "machine-code.jsonl"


def lines_of(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per kernel, tile, dtype, head size and assembler from the results of the plugin."""
    groups: dict[tuple, list[dict]] = {}
    for each in found:
        if "ptx" in each:
            groups.setdefault(by_tile(each), []).append(each)
    lines = []
    for (kernel, tile, dtype, width, assembler), group in sorted(groups.items()):
        variants = {each["ptx"]: each for each in group}
        outcomes = [each["outcome"] for each in variants.values()]
        compared = [each for each in variants.values() if each["outcome"] != "refused"]
        worst = max(compared, key=lambda each: each["difference"], default={"difference": 0.0, "largest": 0.0})
        lines.append({
            "kernel": kernel, "tile": tile, "dtype": dtype, "width": width, "assembler": assembler,
            "choice": "" if any(not each["choice_made"] for each in group) else group[0]["choice_made"],
            "variants": len(variants), "right": outcomes.count("right"), "not_known": outcomes.count("refused"),
            "wrong": [each["told"][0] for each in variants.values() if each["outcome"] == "wrong"],
            **{name: records.rounded(worst[name]) for name in ("difference", "largest")},
        })  # fmt: skip
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Table of kernels by assemblers: right variants of those that ran."""
    versions = sorted({line["assembler"] for line in lines}, key=lambda name: [int(n) for n in name.split(".")])
    rows = []
    for kernel in sorted({line["kernel"] for line in lines}):
        own = [line for line in lines if line["kernel"] == kernel]
        usual, tuned = (
            {(line["tile"], line["dtype"]) for line in own if bool(line["choice"]) == way} for way in (0, 1)
        )
        cells = []
        for name in versions:
            of = [line for line in own if line["assembler"] == name]
            cells.append(f"{sum(line['right'] for line in of)} of {sum(line['variants'] for line in of)}")
        far = max((line["difference"] / line["largest"] for line in own if line["largest"] > 0), default=0.0)
        rows.append((f"`{kernel}`", str(len(usual)), str(len(tuned)), *cells, f"{far:.1e}" if far else "0"))
    head = ("kernel", "tiles of the cases", "tiles of `tune`", *versions, "largest difference")
    return text_table.markdown(head, rows, names=1)


def section(lines: Sequence[records.Record]) -> str:
    """The text of docs/assemblers.md between BEGIN and END."""
    commits = ", ".join(sorted({line["machine"]["commit"][:7] for line in lines}))
    wrong = [f"- `{each['kernel']}` {each['tile']} {each['dtype']}, ptxas {each['assembler']}: {text}"
             for each in lines for text in each["wrong"]]  # fmt: skip
    left = [f"- `{kernel}`: {', '.join(tiles)}" for kernel, tiles in not_run(lines).items()]
    told = f"Recorded at commit {commits}. Differences are of the largest number of a tensor."
    parts = [table(lines), told if left else f"{told} Every tile of the compile cases for sm_90 has run."]
    lists = {"Wrong:": wrong, "Not run, of the compile cases for sm_90:": left}
    return "\n\n".join([*parts, *(text for head, each in lists.items() if each for text in (head, "\n".join(each)))])


def not_run(lines: Sequence[records.Record]) -> dict[str, list[str]]:
    """Kernel -> the tiles, dtypes and head sizes of the compile cases for sm_90 without a line.

    The cases include tiles that only `fasttfm tune` can choose.
    """
    run = {by_tile(line)[:-1] for line in lines}
    left: dict[str, dict[str, None]] = {}
    for _, case in matrix.enumerate_cases([CHIPS[CHIP]]):
        kinds = [case.arguments[name] for name in case.kernel.arg_names]
        warps = case.num_warps + _OTHER_WARPS * ("hopper" in case.kernel.fn.__module__)
        kernel, tile, dtype = named(case.kernel, case.arguments, kinds, warps, case.num_stages).values()
        width = width_of(case.arguments)
        if (kernel, tile, dtype, width) not in run:
            left.setdefault(kernel, {})[f"{tile} {dtype}" + (f" D{width}" if width else "")] = None
    return {kernel: list(tiles) for kernel, tiles in left.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.executed.machine_code", __doc__)
    parser.add_argument("--ptxas", action="append", default=[], metavar="FILE", help="an additional assembler")
    parser.add_argument("--tuned", action="store_true", help="also each tile that `fasttfm tune` may choose")
    parser.add_argument("-k", dest="cases", metavar="WORDS", help="only cases that match this expression of pytest -k")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    args = parser.parse_args(argv)
    file = found_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    chosen = "(sm_90 or hopper) and not mutation" + (f" and ({args.cases})" if args.cases else "")
    paths = {**assemblers(), **{version(path): path for path in args.ptxas}}
    variables = {"TRITON_INTERPRET": "0", "FASTTFM_TESTS": "all", "ASSEMBLED": str(file),
                 "ASSEMBLERS": ":".join(paths.values()), "ASSEMBLED_TUNED": str(int(args.tuned))}  # fmt: skip
    words = ["-p", "tests.executed.assembled", "-o", "timeout=0", "-m", "executed or not executed", "-k", chosen]
    run_tests([*words, *TESTS], args.workers, variables)
    lines = lines_of(map(json.loads, file.read_text(encoding="utf-8").splitlines()))
    about = machine.describe()
    made = [{"benchmark": "machine_code", **line, "machine": about} for line in lines]
    kept = args.results / "machine-code.jsonl"
    records.write(kept, made, by_tile)
    if args.results == records.RESULTS:
        content = f"\n\n{section(records.read(kept))}\n\n"
        text = text_table.replaced(PAGE.read_text(encoding="utf-8"), BEGIN, END, content)
        PAGE.write_text(text, encoding="utf-8")
    wrong = [line for line in lines if line["wrong"]]
    print(table(lines))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
