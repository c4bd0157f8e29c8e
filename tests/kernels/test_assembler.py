"""The assembler of a chip, its version and published fault, and the reason for not using a newer one."""

import os
import stat

import pytest

from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import budgets
from fasttfm.kernels.proof.assembler import FAULTS, assembler, by_chips, in_use, left, toolchain
from fasttfm.kernels.proof.cases import residual_add
from fasttfm.kernels.proof.ledger import counted


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """choose(version): sets TRITON_PTXAS_PATH to a ptxas of that version."""

    def make(version: str) -> str:
        file = tmp_path / version / "ptxas"
        file.parent.mkdir()
        file.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
        os.chmod(file, file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(file))
        return str(file)

    return make


def test_the_users_assembler_overrides_tritons_and_its_published_fault_is_named(choose):
    path = choose("12.8.93")
    assert (assembler(80).path, assembler(80).version) == (path, "12.8.93")
    assert assembler(80).variable == "TRITON_PTXAS_PATH"
    assert left(assembler(80)) == {}
    assert in_use(80) == f"sm_80 is assembled by ptxas 12.8.93 ({path}), which {FAULTS['12.8.93']}"
    assert "issue 1262" not in in_use(120)  # another assembler


def test_there_is_a_reason_for_not_using_a_newer_assembler():
    """Fails for a Triton with other assemblers, which needs a decision in LEFT."""
    for chips, used in by_chips().items():
        assert "not tried" not in left(used).values(), chips


def test_budgets_and_cached_counts_depend_on_the_assembler(choose, monkeypatch):
    monkeypatch.setattr(counted.compiling, "specialization", lambda case: ())  # interpreted kernels have none
    monkeypatch.setattr(counted, "source_of", lambda kernel: ())
    sm_60, sm_120 = CHIPS["sm_60"], CHIPS["sm_120"]
    case = next(iter(residual_add.compile_cases(sm_60)))
    before = [counted.digest(chip, case) for chip in (sm_60, sm_120)]
    assert budgets.read()[0] == toolchain()
    choose("99.1.2")
    assert "ptxas 99.1.2 for sm_60 to " in toolchain()
    assert [counted.digest(chip, case) == then for chip, then in zip((sm_60, sm_120), before)] == [False, True]
