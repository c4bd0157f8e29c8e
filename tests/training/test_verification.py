"""Prepared data are compared with their digests before a run begins."""

from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from fasttfm.errors import UserError
from fasttfm.training.run import train


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
    assert not (tmp_path / "model").exists()


def test_an_emptied_manifest_ends_a_run_before_it_begins(tiny_data: Path, tmp_path: Path, tiny_values):
    copytree(tiny_data, tmp_path / "DATA")
    (tmp_path / "DATA" / "sha256sums").write_bytes(b"")
    with pytest.raises(UserError, match="sha256sums: is empty"):
        train(tiny_values(max_update=3), tmp_path / "DATA", tmp_path / "model")
