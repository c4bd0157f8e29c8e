"""Prepared data are compared with their digests while a run goes on."""

import threading
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from fasttfm.errors import UserError
from fasttfm.folders import Verification
from fasttfm.training.run import train
from fasttfm.training.updates import Updates


@pytest.fixture
def damaged(tiny_data: Path, tmp_path: Path) -> Path:
    """Prepared data with one flipped bit in a token."""
    copytree(tiny_data, tmp_path / "DATA")
    file = tmp_path / "DATA" / "train.src.npy"
    ids = np.load(file)
    ids[7] ^= 1
    np.save(file, ids)
    return tmp_path / "DATA"


def test_a_flipped_bit_ends_a_run_by_name(damaged: Path, tmp_path: Path, tiny_values):
    with pytest.raises(UserError, match=r"train\.src\.npy: is damaged or changed, its SHA-256"):
        train(tiny_values(max_update=3), damaged, tmp_path / "model")


def test_an_emptied_manifest_ends_a_run_before_it_begins(tiny_data: Path, tmp_path: Path, tiny_values):
    copytree(tiny_data, tmp_path / "DATA")
    (tmp_path / "DATA" / "sha256sums").write_bytes(b"")
    with pytest.raises(UserError, match="sha256sums: is empty"):
        train(tiny_values(max_update=3), tmp_path / "DATA", tmp_path / "model")


def test_training_ends_before_the_next_update_once_damage_is_known(
    damaged: Path, tmp_path: Path, tiny_values, monkeypatch
):
    monkeypatch.setattr(Verification, "finish", lambda self: None)  # what ends the run otherwise
    before = Updates.perform

    def perform(updates, *given):
        assert not updates.position.step
        for thread in threading.enumerate():
            if thread.name == "verification":
                thread.join()
        return before(updates, *given)

    monkeypatch.setattr(Updates, "perform", perform)
    with pytest.raises(UserError, match=r"train\.src\.npy: is damaged"):
        train(tiny_values(max_update=3), damaged, tmp_path / "model")
