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


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path):
    row_sums.device_caches.clear()
    with triton.knobs.cache.scope():  # monkeypatch would leave the folder set, and TRITON_CACHE_DIR unread
        triton.knobs.cache.dir = str(tmp_path)
        yield


def launch(rows: int, columns: int = 200, **options) -> torch.Tensor:
    """As a new process would."""
    translated.cache_clear()
    with executed("sm_90", **options):
        x, out = torch.randn(rows, columns), torch.empty(rows)
        row_sums[(rows,)](x, out, 200, N=256)
    torch.testing.assert_close(out, x[:, :200].sum(1))
    return out


def unread(text: str):
    raise AssertionError("PTX is read again")


def test_a_kernel_is_read_once_for_all_processes(monkeypatch):
    launch(3)
    monkeypatch.setattr(code, "parse", unread)
    launch(5)


def test_a_fault_is_located_in_what_was_kept():
    launch(3)
    with pytest.raises(FaultyKernel, match=r"bounds.*test_kept.py"):
        launch(3, 100)


def test_other_ptx_is_read(monkeypatch):
    launch(3)
    monkeypatch.setattr(code, "parse", unread)
    with pytest.raises(AssertionError, match="read again"):
        launch(3, rewrite=lambda ptx: ptx + "\n")


def test_what_another_version_kept_is_not_taken(monkeypatch):
    launch(3)
    monkeypatch.setattr(code, "_file", lambda: "ptx_check-other")
    monkeypatch.setattr(code, "parse", unread)
    with pytest.raises(AssertionError, match="read again"):
        launch(3)
