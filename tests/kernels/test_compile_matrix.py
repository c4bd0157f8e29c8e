"""Ring 3: every kernel and tile compiles for every chip within its budget, without a device.

The gate compiles a few cases, `make test-all` the heaviest of every kernel, `pytest -m compile_matrix` all.
"""

import ast
import dataclasses
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.measure import records
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import budgets
from fasttfm.kernels.proof import matrix as compile_matrix
from fasttfm.kernels.proof import report as compile_report
from fasttfm.kernels.proof.assembler import toolchain
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import Resources
from ptx_check.ledger.count import Usage

KNOWN, SAMPLED = compile_matrix.KNOWN, compile_matrix.SAMPLED
KERNELS = Path(compile_matrix.__file__).parents[1]
ALL = dict(compile_matrix.enumerate_cases(KNOWN.values()))
QUICK_CHIPS = ("sm_60", "sm_70", "sm_80", "sm_90")


@pytest.fixture(scope="module")
def recorded():
    """The recorded budgets."""
    return budgets.read()[1]


def test_every_kernel_that_the_host_launches_is_in_the_matrix():
    """Those decorated @jit; @triton.jit and @gluon.jit functions are called by kernels only."""
    kernels = {
        (".".join(file.relative_to(KERNELS).with_suffix("").parts), node.name)
        for file in KERNELS.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(each) == "jit" for each in node.decorator_list)
    }
    assert len(kernels) > 20
    assert kernels <= {(compile_report.family(case), case.kernel.__name__) for case in ALL.values()}


def test_every_chip_has_cases_of_every_kernel_file():
    chip_of = {family: "sm_90" for family in compile_matrix.families() if "hopper" in family}
    chip_of |= {"attention.blackwell": "sm_100"}
    everywhere = compile_matrix.families() - chip_of.keys()
    for chip in KNOWN:
        own = {family for family, each in chip_of.items() if each == chip}
        assert {task.family for task in ALL if task.chip == chip} == everywhere | own
    assert sum(task.chip in SAMPLED for task in ALL) == len(SAMPLED) * len(everywhere)


same_toolchain = pytest.mark.skipif(
    budgets.read()[0] != toolchain(), reason="the budgets are of another Triton or assembler, which may use other tiles"
)


@same_toolchain
def test_there_is_a_budget_for_exactly_the_listed_cases(recorded):
    listed = {budgets.key(KNOWN[task.chip], case) for task, case in ALL.items()}
    unrecorded, stale = sorted(listed - recorded.keys()), sorted(recorded.keys() - listed)
    remedy = "python -m fasttfm.kernels.proof.matrix --update-budgets"
    assert not unrecorded, f"{len(unrecorded)} cases without a budget, such as {unrecorded[:3]}: {remedy}"
    assert not stale, f"{len(stale)} budgets without a case, such as {stale[:3]}: {remedy}"


def test_no_budget_breaks_a_rule(recorded):
    kept = [(KNOWN[task.chip], case) for task, case in ALL.items()]
    kept = [(chip, case) for chip, case in kept if budgets.key(chip, case) in recorded]
    assert len(kept) > len(ALL) / 2
    broken = [
        f"{chip.name} {case.name} {case.dtype} {complaint}"
        for chip, case in kept
        for complaint in budgets.broken_rules(chip, case, recorded[budgets.key(chip, case)])
    ]
    assert not broken, "\n".join(broken)


def assert_within_budgets(tasks: list[compile_matrix.Task]) -> None:
    lines = compile_matrix.all_complaints({task: ALL[task] for task in tasks}, compile_matrix.compile_tasks(tasks))
    assert not lines, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("step", [24, pytest.param(1, marks=pytest.mark.whole)])
def test_the_heaviest_case_of_every_kernel_and_a_light_one_of_other_chips_compile_within_their_budgets(step):
    heaviest = compile_matrix.heaviest({task: case for task, case in ALL.items() if task.chip in QUICK_CHIPS})
    light = [task for task in ALL if task.chip in SAMPLED and task.family == "residual_add"]
    assert len(light) == len(SAMPLED)
    assert_within_budgets([*heaviest[::step], *light])


@pytest.mark.compile_matrix
def test_every_case_compiles_within_its_budget_on_every_chip(request):
    if "compile_matrix" not in request.config.getoption("-m"):
        pytest.skip("takes long: pytest -m compile_matrix, or make compile-matrix")
    assert_within_budgets(list(ALL))


def any_case(**changes) -> CompileCase:
    return dataclasses.replace(next(iter(ALL.values())), **changes)


LIGHT = Resources(registers=40, spill=0, shared=1024, matrix=4)


@pytest.mark.parametrize(
    ("chip", "dtype", "changes", "broken"),
    [
        ("sm_80", "bf16", {}, None),
        ("sm_80", "bf16", {"spill": 8}, "spills 8 bytes"),
        ("sm_90", "bf16", {"spill": 8}, "spills 8 bytes"),
        ("sm_60", "bf16", {"spill": 8}, None),
        ("sm_60", "bf16", {"shared": 49153}, "49153 bytes"),
        ("sm_80", "bf16", {"matrix": 0}, "no matrix instruction"),
        ("sm_60", "bf16", {"matrix": 0}, None),  # without matrix units for Triton
        ("sm_80", "fp32", {"matrix": 0}, None),
        ("sm_100", "fp32", {}, "in TF32"),
        ("gfx942", "fp32", {}, None),  # it has matrix instructions for float32
    ],
)
def test_the_rules_hold_without_a_record(chip, dtype, changes, broken):
    product = any_case(matrix_product=True, dtype=dtype)
    lines = budgets.broken_rules(CHIPS[chip], product, dataclasses.replace(LIGHT, **changes))
    assert broken in lines[0] if broken else not lines


def test_spills_of_some_kernels_are_allowed_outside_of_their_loops():
    heads = any_case(name="attention.backward.heads/causal/D64/32x64w4s3", dtype="bf16")
    spilling = dataclasses.replace(LIGHT, spill=16)
    assert budgets.broken_rules(CHIPS["sm_80"], heads, spilling, [Usage(spilled=0)]) == []
    (broken,) = budgets.broken_rules(CHIPS["sm_80"], heads, spilling, [Usage(spilled=0), Usage(spilled=2)])
    assert "inside of a loop" in broken


@pytest.mark.parametrize(
    ("changes", "grown"),
    [
        ({}, []),
        ({"registers": 41}, ["registers 40 -> 41"]),
        ({"spill": 16}, ["spill 0 -> 16"]),
        ({"shared": 2048}, ["shared 1024 -> 2048"]),
        ({"matrix": 2}, ["matrix instructions 4 -> 2"]),
        ({"registers": 39, "shared": 0}, []),
        ({"bound": 20.5, "outside": 103}, []),
        ({"bound": 20.7}, ["bound 20.0 -> 20.7 cycles per element"]),
        ({"outside": 120}, ["instructions outside of loops 100 -> 120"]),
    ],
)
def test_growth_is_a_regression_of_counts_beyond_three_percent(changes, grown):
    before = dataclasses.replace(LIGHT, bound=20.0, outside=100)
    assert budgets.regressions(dataclasses.replace(before, **changes), before) == grown
    assert budgets.regressions(before, LIGHT) == []  # not counted when it was recorded


def test_budgets_survive_being_written_and_read(tmp_path):
    file = tmp_path / "budgets.csv"
    written = {("sm_90", "a.kernel/x", "bf16"): LIGHT, ("sm_100", "a.kernel/x", "bf16"): LIGHT}
    budgets.write("triton 3.7.1, ptxas 12.8.93 for sm_60 and newer", written, file)
    assert budgets.read(file) == ("triton 3.7.1, ptxas 12.8.93 for sm_60 and newer", written)
    assert [line.split(",")[2] for line in file.read_text().splitlines()[2:]] == ["sm_90", "sm_100"]
    assert "not in budgets.csv" in budgets.regressions(LIGHT, None)[0]


@same_toolchain
def test_the_page_shows_the_budgets():
    """The table of docs/compile-matrix.md is written by --update-budgets."""
    shown = compile_report.PAGE.read_text().partition(compile_report.BEGIN)[2].partition(compile_report.END)[0]
    assert shown == f"\n```text\n{compile_matrix.recorded_table()}\n```\n"


def test_the_page_shows_the_records_of_other_toolchains():
    page, recorded = compile_report.PAGE.read_text(), records.read(records.RESULTS / "compile-matrix.jsonl")
    assert recorded
    for record in recorded:
        broken = {(line["chip"], line["case"], line["dtype"]) for line in record["broken"]}
        row = (record["toolchain"], ", ".join(record["chips"]), str(record["cases"]), str(len(broken)))
        assert f"| {' | '.join(row)} |" in page, row


def test_a_run_of_one_kernel_writes_a_record_that_follows_its_schema(tmp_path):
    file = tmp_path / "new" / "compile-matrix.jsonl"
    words = ["--chips", "sm_60,sm_80", "--kernels", "residual_add", "--heaviest", "--workers", "1"]
    assert compile_matrix.main([*words, "--record", str(file)]) == 0
    (record,) = records.read(file)
    assert (record["toolchain"], record["chips"]) == (toolchain(), ["sm_60", "sm_80"])
    assert record["triton"] == metadata.version("triton")
    assert record["cases"] == record["compiled"] > 0
    assert record["broken"] == []


def test_a_record_names_the_cases_that_break_a_rule(tmp_path):
    file = tmp_path / "compile-matrix.jsonl"
    product = next(task for task, case in ALL.items() if case.matrix_product and task.chip == "sm_80")
    other = next(task for task, case in ALL.items() if not case.matrix_product and task.chip == "sm_90")
    cases = {task: ALL[task] for task in (product, other)}
    spilling = dataclasses.replace(LIGHT, spill=8)
    failed = compile_matrix.Outcome(None, "ptxas: no")
    for _ in range(2):
        compile_matrix.write_record(file, cases, {product: compile_matrix.Outcome(spilling), other: failed})
    first, record = records.read(file)
    assert first["broken"] == record["broken"]
    assert (record["cases"], record["compiled"]) == (2, 1)
    complaints = {(line["chip"], line["case"]): line["complaint"] for line in record["broken"]}
    assert "spills 8 bytes" in complaints["sm_80", ALL[product].name]
    assert complaints["sm_90", ALL[other].name] == "does not compile: ptxas: no"
    (bound,) = record["bounds"]
    budget = budgets.read()[1][budgets.key(CHIPS["sm_80"], ALL[product])]
    assert (bound["case"], bound["bound"], bound["budget"]) == (ALL[product].name, 0.0, budget.bound)
