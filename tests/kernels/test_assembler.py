"""The assembler of a chip: what depends on its version, and the reason for not using a newer one."""

from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import budgets
from fasttfm.kernels.proof.assembler import by_chips, in_use, left, toolchain
from fasttfm.kernels.proof.cases import residual_add
from fasttfm.kernels.proof.ledger import counted


def test_there_is_a_reason_for_not_using_a_newer_assembler():
    """Fails for a Triton with other assemblers, which needs a decision in LEFT."""
    for chips, used in by_chips().items():
        assert "not tried" not in left(used).values(), chips


def test_budgets_and_cached_counts_depend_on_the_assembler(tmp_path, monkeypatch):
    monkeypatch.setattr(counted.compiling, "specialization", lambda case: ())  # interpreted kernels have none
    monkeypatch.setattr(counted, "source_of", lambda kernel: ())
    sm_60, sm_120 = CHIPS["sm_60"], CHIPS["sm_120"]
    case = next(iter(residual_add.compile_cases(sm_60)))
    before = [counted.digest(chip, case) for chip in (sm_60, sm_120)]
    assert budgets.read()[0] == toolchain()
    file = tmp_path / "ptxas"
    file.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.2'\n")
    file.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(file))
    assert "ptxas 99.1.2 for sm_60 to " in toolchain()
    assert in_use(80) == f"sm_80 is assembled by ptxas 99.1.2 ({file})"
    assert [counted.digest(chip, case) == then for chip, then in zip((sm_60, sm_120), before)] == [False, True]
