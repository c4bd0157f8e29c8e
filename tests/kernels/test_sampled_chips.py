"""Chips beside the compile matrix's: a sample of cases compiles within its budgets. No device is needed."""

import os
import subprocess
import sys

import pytest

from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import budgets, matrix, sampled

CASES = list(sampled.cases())


def run(*words: str) -> str:
    """What the command prints, which compiles: in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fasttfm.kernels.proof.sampled", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_sample_has_every_kernel_file_on_every_chip_and_budgets_for_it_alone():
    assert not sampled.CHIPS.keys() & CHIPS.keys()
    assert len(CASES) == len(sampled.CHIPS) * len(matrix.families())
    assert {budgets.key(chip, case) for chip, case in CASES} == budgets.read(sampled.FILE)[1].keys()


def test_nothing_recorded_of_the_sample_breaks_a_rule():
    _, known = budgets.read(sampled.FILE)
    broken = [budgets.broken_rules(chip, case, known[budgets.key(chip, case)]) for chip, case in CASES]
    assert not any(broken), broken


def test_a_light_case_compiles_within_its_budget_on_each_chip():
    assert (
        run("--kernels", "residual_add") == f"{len(sampled.CHIPS)} cases on {len(sampled.CHIPS)} chips, 0 complaints\n"
    )


@pytest.mark.compile_matrix
def test_the_whole_sample_compiles_within_its_budgets(request):
    if "compile_matrix" not in request.config.getoption("-m"):
        pytest.skip("takes minutes: pytest -m compile_matrix")
    assert f"{len(CASES)} cases" in run()
