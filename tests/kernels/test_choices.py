"""Choices of tiles and routes: shipped answers, tuned answers, and unusable files of `fasttfm tune`."""

import dataclasses
import json
import warnings

import pytest
import torch

from fasttfm.kernels import choice_cache, choices
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.choice_cache import Measured

SM_80, SM_90 = CHIPS["sm_80"], CHIPS["sm_90"]


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


def test_a_tuned_answer_overrides_the_shipped_one_for_its_chip_and_size(tile):
    assert tile(SM_90, 512, "bf16") == Tile(8)
    choices.keep(SM_90, {("test.tile", (512, "bf16")): "rows=4"})
    assert tile(SM_90, 512, "bf16") == Tile(4)
    assert tile(SM_90, 1024, "bf16") == Tile(16)
    assert tile(SM_80, 512, "bf16") == Tile(8)
    choices.keep(SM_90, {})
    assert tile(SM_90, 512, "bf16") == Tile(8)


def test_two_choices_of_one_name_are_refused(tile):
    with pytest.raises(ValueError, match=r"two choices named test\.tile"):
        choices.Choice("test.tile", lambda chip: Tile(1), lambda chip: ())


def test_an_invalid_tuned_answer_drops_them_all_with_one_warning(tile):
    choices.keep(SM_90, {("test.tile", (512, "bf16")): "rows=3", ("test.tile", (64, "bf16")): "rows=4"})
    with pytest.warns(RuntimeWarning, match="run `fasttfm tune` again"):
        assert tile(SM_90, 512, "bf16") == Tile(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tile(SM_90, 64, "bf16") == Tile(1)


@pytest.fixture
def system(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTTFM_CACHE", str(tmp_path))
    versions = {"torch": "2.13.0", "triton": "3.7.1"}
    system = {"device": "NVIDIA H200", "chip": "sm_90", "driver": "550.1", "versions": versions}
    monkeypatch.setattr(choice_cache, "system_of", lambda device, chip: system)
    return system


DEVICE = torch.device("cuda", 0)
TUNED = {("test.tile", (512, "bf16")): Measured("rows=2", 10.0, 12.5)}


def assert_ignored_with_one_warning(tile, message):
    with pytest.warns(RuntimeWarning, match=message) as caught:
        choice_cache.load(DEVICE, SM_90)
    assert len(caught) == 1
    assert tile(SM_90, 512, "bf16") == Tile(8)


def test_a_written_file_is_read_and_applied(tile, system):
    choice_cache.write(system, TUNED)
    assert choice_cache.read(system) == TUNED
    choice_cache.load(DEVICE, SM_90)
    assert tile(SM_90, 512, "bf16") == Tile(2)


@pytest.mark.parametrize("change", [{"driver": "560.2"}, {"versions": {"torch": "2.14.0", "triton": "3.7.1"}}])
def test_a_file_of_another_driver_or_version_is_ignored_with_one_warning(tile, system, change):
    choice_cache.write({**system, **change}, TUNED)
    assert_ignored_with_one_warning(tile, "another driver or version")


def test_a_file_of_another_device_is_ignored_silently(tile, system):
    choice_cache.write({**system, "device": "NVIDIA H200 NVL"}, TUNED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice_cache.load(DEVICE, SM_90)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"format": 2', '"format": 99'),
        lambda text: text.replace('"size_class"', '"size"'),
        lambda text: json.dumps({"format": 2, "answers": [3]}),
        lambda text: text.replace('"bf16"', '["bf16"]'),
        lambda text: "[" * 100_000,
    ],
    ids=[
        "truncated",
        "empty",
        "a list",
        "another format",
        "a renamed field",
        "a wrong entry",
        "a wrong size",
        "nested",
    ],
)
def test_a_damaged_file_is_ignored_with_one_warning_that_names_it(tile, system, damage):
    file = choice_cache.write(system, TUNED)
    file.write_text(damage(file.read_text()))
    assert_ignored_with_one_warning(tile, f"{file.name} is damaged")


def test_a_renamed_file_of_another_system_is_ignored_with_one_warning(tile, system):
    choice_cache.write({**system, "driver": "560.2"}, TUNED).rename(choice_cache.file_of(system))
    assert_ignored_with_one_warning(tile, "is damaged: it was measured on NVIDIA H200 560.2")


def test_environment_variables_select_the_cache_folder(monkeypatch, tmp_path, system):
    monkeypatch.delenv("FASTTFM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choice_cache.file_of(system).parent == tmp_path / "fasttfm" / "tuned"
    monkeypatch.setenv("FASTTFM_CACHE", str(tmp_path / "own"))
    assert choice_cache.file_of(system).parent == tmp_path / "own" / "tuned"
    assert choice_cache.file_of(system).name.startswith("NVIDIA-H200-")


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  560.35.03  Fri Aug 16 21:39:15 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build",
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  560.35.03  Release Build",
    ],
)
def test_the_version_of_the_driver_is_parsed(line, tmp_path, monkeypatch):
    (tmp_path / "version").write_text(line + "\nGCC version:  gcc version 12.2.0\n")
    monkeypatch.setattr(choice_cache, "_DRIVERS", ((tmp_path / "version", choice_cache._DRIVERS[0][1]),))
    assert choice_cache.driver() == "560.35.03"
