"""The tables of docs/p100.md, written from the code that decides and from the compile matrix's records.

python -m benchmarks.limits.old_chips          writes them anew; a test fails while they differ
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure.machine import ROOT
from benchmarks.measure.text_table import markdown
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.compile_case import CHIPS
from fasttfm.kernels.proof import budgets
from fasttfm.kernels.proof.matrix import families
from fasttfm.kernels.proof.resources import Resources
from fasttfm.kernels.tiles.feed_forward import epilogue_route

PAGE = ROOT / "docs" / "p100.md"
OLD = {"sm_60": "P100", "sm_70": "V100", "sm_75": "T4"}
_LENGTHS = (27, 100, 500, 2_000)
_KINDS = {"fp32": "float32", "fp16": "float16"}
_ATTENTION = {
    "short": "one Triton kernel, all keys of a row at once",
    "flash": "one Triton kernel, tile after tile",
    "softmax": "cuBLAS, one Triton kernel for mask, softmax and dropout, cuBLAS",
}
_FEED_FORWARD = {"fused": "Triton product with everything in it", "cublas": "cuBLAS and one pass for what remains"}


def routes() -> str:
    """Return the route of each operator on each chip, as the functions that decide answer."""
    rows = []
    for kind, dtype in _KINDS.items():
        for keys in _LENGTHS:
            width = attention_launch.width_class(64)
            size = attention_launch.key_class(keys)

            def attention(chip: Chip, kind: str = kind, width: int = width, size: int = size) -> str:
                return _ATTENTION[attention_launch.route(chip, kind, width, size)]

            rows.append(_row(f"attention, {keys:,} keys, heads of 64", dtype, attention))
        for product in ("forward", "forward+dropout", "backward"):

            def feed_forward(chip: Chip, kind: str = kind, product: str = product) -> str:
                return _FEED_FORWARD[epilogue_route(chip, kind, product)]

            rows.append(_row(f"feed-forward, {product.replace('+', ' with ')}", dtype, feed_forward))
    rows.append(_row("LayerNorm, residual + dropout + LayerNorm", "both", lambda chip: "one Triton kernel"))
    rows.append(_row("loss over the vocabulary", "both", lambda chip: "cuBLAS, one Triton kernel, cuBLAS"))
    rows.append(_row("embedding + position + dropout", "both", lambda chip: "one Triton kernel"))
    return markdown(["operator", "dtype", *(f"{name} ({chip})" for chip, name in OLD.items())], rows)


def _row(operator: str, dtype: str, answer: Callable[[Chip], str]) -> list[str]:
    return [operator, dtype, *(answer(CHIPS[chip]) for chip in OLD)]


def proved() -> str:
    """Return what the compile matrix has recorded of each kernel family on these chips."""
    version, recorded = budgets.read()
    result: dict[tuple[str, str], list[tuple[str, Resources]]] = defaultdict(list)
    for (chip, case, dtype), resources in recorded.items():
        if chip in OLD and dtype in _KINDS:
            result[_family(case), chip].append((f"{case} {dtype}", resources))
    rows = [
        [f"`kernels/{family.replace('.', '/')}.py`", *(_summary(result[family, chip]) for chip in OLD)]
        for family in sorted({family for family, _ in result})
    ]
    head = (f"{name} ({chip}, {CHIPS[chip].shared_memory // 1024} KiB for a program)" for chip, name in OLD.items())
    return (
        f"Triton {version}, float32 and float16. Each cell: cases that compile; most registers of a thread; most\n"
        "shared memory of a program; cases that spill registers to memory.\n\n" + markdown(["kernels", *head], rows)
    )


def _family(case: str) -> str:
    """The kernel file that lists a case: attention.short of attention.short.forward/causal/..."""
    kernel = case.split("/")[0] + "."
    return max((family for family in families() if kernel.startswith(f"{family}.")), key=len)


def _summary(cases: list[tuple[str, Resources]]) -> str:
    if not cases:
        return "none recorded"
    spilling = [(name, result.spill) for name, result in cases if result.spill]
    worst = max(spilling, key=lambda each: each[1], default=None)
    spills = "none spills" if worst is None else f"{len(spilling)} spill, up to {worst[1]} bytes"
    registers = max(result.registers for _, result in cases)
    shared = max(result.shared for _, result in cases) / 1024
    return f"{len(cases)}; {registers}; {shared:.3g} KiB; {spills}"


TABLES = {"routes": routes, "proved": proved}


def updated(text: str) -> str:
    """The page with its tables as the code has them now. Raises ValueError where a marker is missing."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: python -m benchmarks.limits.old_chips -->", f"<!-- end of {name} -->"
        before, result, rest = text.partition(begin)
        _, separator, after = rest.partition(end)
        if not result or not separator:
            raise ValueError(f"docs/p100.md needs the lines {begin} and {end}")
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


def main(page: Path = PAGE) -> int:
    page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
