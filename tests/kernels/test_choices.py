"""Choices of tiles and routes: shipped answers, and files of `fasttfm tune`."""

import contextlib
import dataclasses
import json
import warnings

import pytest
import torch

from fasttfm.kernels import choice_cache, choices
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.choice_cache import Measured

SM_80, SM_90 = CHIPS["sm_80"], CHIPS["sm_90"]
SYSTEM = {
    "device": "NVIDIA H200",
    "chip": "sm_90",
    "driver": "550.1",
    "versions": {"torch": "2.13.0", "triton": "3.7.1"},
}
TUNED = {("test.tile", (512, "bf16")): Measured("rows=2", 10.0, 12.5)}


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int

    def __str__(self):
        return f"rows={self.rows}"


@pytest.fixture
def tile(monkeypatch):
    monkeypatch.setattr(choices, "CHOICES", {})
    monkeypatch.setattr(choices, "_kept", {})
    others = (Tile(1), Tile(2), Tile(4))
    return choices.Choice("test.tile", lambda chip, columns, dtype: Tile(columns // 64), lambda *size: others)


@contextlib.contextmanager
def warned(message):
    """One warning, or none if message is ''."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [message in str(each.message) for each in caught] == [True] * bool(message), caught


def test_a_tuned_answer_overrides_the_shipped_one_for_its_chip_and_size(tile):
    assert tile(SM_90, 512, "bf16") == Tile(8)
    choices.keep(SM_90, {("test.tile", (512, "bf16")): "rows=4"})
    assert tile(SM_90, 512, "bf16") == Tile(4)
    assert tile(SM_90, 1024, "bf16") == Tile(16)
    assert tile(SM_80, 512, "bf16") == Tile(8)
    choices.keep(SM_90, {})
    assert tile(SM_90, 512, "bf16") == Tile(8)


def test_an_invalid_tuned_answer_drops_them_all_with_one_warning(tile):
    choices.keep(SM_90, {("test.tile", (512, "bf16")): "rows=3", ("test.tile", (64, "bf16")): "rows=4"})
    with warned("run `fasttfm tune` again"):
        assert tile(SM_90, 512, "bf16") == Tile(8)
        assert tile(SM_90, 64, "bf16") == Tile(1)


# ----------------------------------------------------------------------------------------------------- tuned files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user has tuned nothing on an H200."""
    monkeypatch.setenv("FASTTFM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice_cache, "system_of", lambda device, chip: SYSTEM)
    yield tmp_path
    choices.keep(SM_90, {})


def load():
    choice_cache.load(torch.device("cuda", 0), SM_90)


def test_a_written_file_is_read_and_applied(tile, folder):
    choice_cache.write(SYSTEM, TUNED)
    assert choice_cache.read(SYSTEM) == TUNED
    load()
    assert tile(SM_90, 512, "bf16") == Tile(2)


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"driver": "560.2"}, "another driver or version"),
        ({"versions": {"torch": "2.14.0", "triton": "3.7.1"}}, "another driver or version"),
        ({"device": "NVIDIA H200 NVL"}, ""),
    ],
    ids=["driver", "version", "device"],
)
def test_a_file_of_another_system_is_ignored(tile, folder, change, warning):
    file = choice_cache.write({**SYSTEM, **change}, TUNED)
    with warned(warning):
        load()
    assert tile(SM_90, 512, "bf16") == Tile(8)
    file.rename(choice_cache.file_of(SYSTEM))
    with warned("is damaged: it was measured on"):
        load()
    assert tile(SM_90, 512, "bf16") == Tile(8)


DAMAGES = {
    "truncated": lambda text: text[: len(text) // 2],
    "another format": lambda text: text.replace('"format": 2', '"format": 99'),
    "a wrong entry": lambda text: json.dumps({"format": 2, "answers": [3]}),
    "nested": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_ignored_with_one_warning_that_names_it(tile, folder, damage):
    file = choice_cache.write(SYSTEM, TUNED)
    file.write_text(damage(file.read_text()))
    with warned(f"{file.name} is damaged"):
        load()
    assert tile(SM_90, 512, "bf16") == Tile(8)
