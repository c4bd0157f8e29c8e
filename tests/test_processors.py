"""Emulated processors: which ones a machine supports, and that libraries obey the restrictions."""

import os
import subprocess
import sys

import pytest

from benchmarks.measure import machine
from tests import processors

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.mark.skipif(not processors.instructions() >= AVX512, reason="needs a processor with AVX-512")
def test_pytorch_and_numba_obey_the_restrictions():
    (avx2,) = (one for one in processors.PROCESSORS if one.name == "avx2")
    program = (
        "import torch; from torch.backends import cpu; print(cpu.get_cpu_capability());"
        "from numba.core.registry import cpu_target as t; print(t.target_context.codegen().magic_tuple()[1:])"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, **avx2.variables}
    capability, target = subprocess.check_output(command, env=environment, text=True).splitlines()
    assert capability == "AVX2"
    assert "haswell" in target
    assert "avx512" not in target


def test_the_test_paths_exist():
    assert [test for test in processors.TESTS if not (machine.ROOT / "tests" / test).exists()] == []
