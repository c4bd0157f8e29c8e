"""Memory limits: one-line errors, peak memory, freed memory."""

import platform
import subprocess
import sys

import pytest
import torch

from fasttfm.errors import UserError, is_out_of_memory
from fasttfm.system.memory import peak_memory

pytest.importorskip("resource")


@pytest.mark.parametrize(
    ("is_one", "error"),
    [
        (True, MemoryError()),
        (True, OSError(12, "Cannot allocate memory")),
        (True, ImportError("libtorch_cpu.so: failed to map segment from shared object")),
        (True, RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")),
        (True, torch.OutOfMemoryError("CUDA out of memory")),
        (False, RuntimeError("a bug")),
        (False, UserError("out of memory: told already")),
        (False, PermissionError(13, "Permission denied", "/data/stackoverflow/train.en")),
        (False, RuntimeError("value cannot be converted to type at::Half without overflow")),
    ],
)
def test_out_of_memory_errors_are_recognized(is_one, error):
    assert is_out_of_memory(error) == is_one


def test_peak_memory_excludes_the_parent_process():
    before = peak_memory()
    grown = torch.ones(60 << 20)
    assert peak_memory() >= 60 << 22
    assert grown.sum() == 60 << 20
    script = "from fasttfm.system.memory import peak_memory; print(peak_memory())"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(child.stdout) < min(before, 100 << 20)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_kept():
    script = """
import resource, torch
from fasttfm.system.memory import keep_freed_memory
def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
keep_freed_memory()
before, tensors = mapped(), [torch.empty(1 << 21) for _ in range(10)]  # 80 MiB
del tensors
print(mapped() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 70 << 20  # less than 80 MiB, because free heap memory is used first
