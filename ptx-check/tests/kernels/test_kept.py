"""What was read and compiled of a kernel, kept for the next process."""

import pytest
import torch
import triton
import triton.language as tl

from ptx_check import FaultyKernel, code, executed
from ptx_check.machine import translated


@triton.jit
def row_sums(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + tl.program_id(0) * n + i, mask=i < n, other=0.0), 0))


def launch(rows: int, columns: int = 200, **options) -> torch.Tensor:
    """As a new process would."""
    translated.cache_clear()
    with executed("sm_90", **options):
        x, out = torch.randn(rows, columns), torch.empty(rows)
        row_sums[(rows,)](x, out, 200, N=256)
    torch.testing.assert_close(out, x[:, :200].sum(1))
    return out


@pytest.fixture(autouse=True)
def kept_by_an_earlier_launch(tmp_path):
    row_sums.device_caches.clear()
    with triton.knobs.cache.scope():  # monkeypatch would leave the folder set, and TRITON_CACHE_DIR unread
        triton.knobs.cache.dir = str(tmp_path)
        launch(3)
        yield


def unread(text: str):
    raise AssertionError("PTX is read again")


def test_a_kernel_is_read_once_for_all_processes_and_its_faults_are_located(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(code, "parse", unread)
        launch(5)
    with pytest.raises(FaultyKernel, match=r"bounds.*test_kept.py"):
        launch(3, 100)


@pytest.mark.parametrize("rewritten", [True, False])
def test_other_ptx_is_read_and_what_another_version_kept_is_not_taken(rewritten, monkeypatch):
    monkeypatch.setattr(code, "parse", unread)
    if not rewritten:
        monkeypatch.setattr(code, "_file", lambda: "ptx_check-other")
    with pytest.raises(AssertionError, match="read again"):
        launch(3, **({"rewrite": lambda ptx: ptx + "\n"} if rewritten else {}))
