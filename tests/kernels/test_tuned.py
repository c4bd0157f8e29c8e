"""Contributed files of `fasttfm tune` are checked, and apply to every device of the same product."""

import json

import pytest
import torch

from fasttfm.kernels import choice_cache, choices
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.choice_cache import Measured
from fasttfm.kernels.proof import tuned
from fasttfm.kernels.tiles.feed_forward import PRODUCT

CHIP = CHIPS["sm_90"]
SYSTEM = {"device": "NVIDIA H200", "chip": "sm_90", "driver": "550.1", "versions": {"triton": "3.7.1"}}
SIZE = ("bf16", "large")
OTHER = PRODUCT.alternatives(CHIP, *SIZE)[0]
DECISION = ("feed_forward.tile", SIZE)
ANSWER = {DECISION: Measured(str(OTHER), 10.0, 12.0)}


@pytest.fixture
def contribute(tmp_path, monkeypatch):
    """contribute(system, answers) makes a shipped file; the user has tuned nothing."""
    monkeypatch.setenv("FASTTFM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice_cache, "SHIPPED", tmp_path)
    monkeypatch.setattr(choice_cache, "system_of", lambda device, chip: SYSTEM)

    def write(system, answers):
        file = choice_cache.write(system, answers)
        return file.replace(tmp_path / file.name)

    yield write
    choices.keep(CHIP, {})


def load():
    choice_cache.load(torch.device("cuda", 0), CHIP)
    return PRODUCT(CHIP, *SIZE)


def test_a_file_of_the_same_product_applies_with_any_driver(contribute):
    contribute({**SYSTEM, "driver": "999.9", "versions": {"triton": "3.5.0"}}, ANSWER)
    assert load() == OTHER != PRODUCT.shipped(CHIP, *SIZE)


def test_a_file_of_another_product_does_not_apply(contribute):
    contribute({**SYSTEM, "device": "NVIDIA H100"}, ANSWER)
    assert load() == PRODUCT.shipped(CHIP, *SIZE)


def test_the_users_own_answers_override_a_contributed_file(contribute):
    contribute(SYSTEM, ANSWER)
    shipped = str(PRODUCT.shipped(CHIP, *SIZE))
    choice_cache.write(SYSTEM, {DECISION: Measured(shipped, 9.0, 9.0)})
    assert load() == PRODUCT.shipped(CHIP, *SIZE)


def test_a_valid_file_passes_the_check(contribute, capsys):
    assert tuned.main([str(contribute(SYSTEM, ANSWER))]) == 0
    assert "1 valid files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"chip": "sm_999"}, "measured on sm_999, which is not one of"),
        ({"format": 99}, "damaged: format 99 is not 2"),
        ({"choice": "nobody"}, "there is no choice nobody"),
        ({"answer": "3x3w3s3"}, "is not an answer of feed_forward.tile"),
        ({"size_class": ["bf16"]}, "feed_forward.tile ('bf16',)"),
    ],
)
def test_an_invalid_file_fails_the_check_with_the_reason(contribute, capsys, change, complaint):
    file = contribute(SYSTEM, ANSWER)
    content = json.loads(file.read_text())
    (content if {"chip", "format"} & change.keys() else content["answers"][0]).update(change)
    file.write_text(json.dumps(content))
    assert tuned.main([str(file)]) == 1
    assert complaint in capsys.readouterr().out


def test_every_shipped_file_is_valid():
    assert [c for file in choice_cache.SHIPPED.glob("*.json") for c in tuned.complaints(file)] == []
