"""The tests on other processors: which there are, and that the caps are really caps."""

import os
import subprocess
import sys

import pytest

from benchmarks.measure import machine
from fasttfm.errors import UserError
from tests import processors

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def names(flags):
    return [processor.name for processor in processors.available(flags)]


def test_a_processor_stands_for_those_it_has_the_instructions_of():
    assert names(AVX2) == ["avx2"]
    assert names(AVX512) == ["avx2", "avx512"]
    assert names(AVX512 | {"avx512_vnni"}) == ["avx2", "avx512", "avx512-vnni"]
    assert names(AVX512 | {"avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"})[-1] == "amx"
    with pytest.raises(UserError, match="AVX2"):
        processors.available(frozenset())


def test_what_cannot_be_had_is_told(monkeypatch):
    monkeypatch.setattr(processors, "instructions", lambda: AVX2)
    with pytest.raises(UserError, match="--processor amx"):
        processors.main(["--processor", "amx"])


@pytest.mark.skipif(not processors.instructions() >= AVX512, reason="needs a processor with AVX-512")
def test_pytorch_numba_and_onednn_obey():
    (avx2,) = (one for one in processors.PROCESSORS if one.name == "avx2")
    program = (
        "import torch; from torch.backends import cpu; print(cpu.get_cpu_capability());"
        "from numba.core.registry import cpu_target as t; print(t.target_context.codegen().magic_tuple()[1:])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **avx2.variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "AVX2" in said
    assert "AVX512" not in said
    assert "haswell" in said
    assert "avx512" not in said


def test_the_tests_exist():
    for test in processors.TESTS:
        assert (machine.ROOT / "tests" / test).exists(), test
