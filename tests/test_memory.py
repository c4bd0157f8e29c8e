"""Memory limits: one-line errors, peak memory, freed memory."""

import platform
import subprocess
import sys

import pytest
import torch

from fasttfm.errors import UserError, is_out_of_memory
from fasttfm.system.memory import peak_memory

pytest.importorskip("resource")

LIMITED = """
import resource, sys
limit = int(sys.argv[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from fasttfm.__main__ import command
sys.argv = ["fasttfm", *sys.argv[2:]]
sys.exit(command())
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("kilobytes", [300_000, 500_000, 700_000])
def test_an_address_space_too_small_for_pytorch_is_reported_in_one_line(kilobytes):
    words = ["train", "--preset", "demo", "--data", "nowhere", "--out", "nowhere"]
    command = [sys.executable, "-c", LIMITED, str(kilobytes), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fasttfm train: out of memory: the address space is limited to {kilobytes >> 10:,} MiB")


@pytest.mark.parametrize(
    ("is_one", "error"),
    [
        (True, MemoryError()),
        (True, OSError(12, "Cannot allocate memory")),
        (True, ImportError("libtorch_cpu.so: failed to map segment from shared object")),
        (True, RuntimeError("can't start new thread")),
        (True, RuntimeError("could not create a primitive")),
        (True, RuntimeError("std::bad_alloc")),
        (True, RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")),
        (True, torch.OutOfMemoryError("CUDA out of memory")),
        (False, RuntimeError("a bug")),
        (False, KeyError("memory")),
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
