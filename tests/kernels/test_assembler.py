"""The assembler is named with its version, and a version with a published fault says so."""

import os
import stat

import pytest

from fasttfm.kernels.proof.assembler import FAULTS, assembler, in_use


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """choose(version): the user's own ptxas, of that version."""

    def make(version: str) -> str:
        file = tmp_path / "ptxas"
        file.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
        os.chmod(file, file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(file))
        return str(file)

    return make


def test_tritons_own_assembler_is_asked_for_its_version():
    assert assembler(80).version.count(".") == 2
    assert assembler(80).path.endswith("ptxas")


def test_the_users_own_assembler_goes_before_it(choose):
    path = choose("13.1.80")
    assert (assembler(90).path, assembler(90).version) == (path, "13.1.80")


def test_a_version_with_a_published_fault_is_known_with_the_way_out(choose):
    choose("12.8.93")
    used = assembler(90)
    assert "issue 1262" in FAULTS[used.version]
    assert used.variable == "TRITON_PTXAS_PATH"
    assert assembler(100).version != "12.8.93"  # another assembler


def test_the_device_queue_names_it_and_its_fault(choose):
    choose("12.8.93")
    said = in_use(90)
    assert said.startswith("sm_90 is assembled by ptxas 12.8.93 (")
    assert "issue 1262" in said
    assert "issue 1262" not in in_use(100)
