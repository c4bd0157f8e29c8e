"""What was measured on a device can be sent in, is checked, and is in force there for everybody."""

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
def sent_in(tmp_path, monkeypatch):
    """sent_in(place, answers): such a file ships; the user has measured nothing."""
    monkeypatch.setenv("FASTTFM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice_cache, "SHIPPED", tmp_path)
    monkeypatch.setattr(choice_cache, "system_of", lambda device, chip: SYSTEM)

    def send(system, answers):
        file = choice_cache.write(system, answers)
        return file.replace(tmp_path / file.name)

    yield send
    choices.keep(CHIP, {})


def load():
    choice_cache.load(torch.device("cuda", 0), CHIP)
    return PRODUCT(CHIP, *SIZE)


def test_a_file_of_the_same_product_is_in_force_whatever_its_driver(sent_in):
    sent_in({**SYSTEM, "driver": "999.9", "versions": {"triton": "3.5.0"}}, ANSWER)
    assert load() == OTHER != PRODUCT.shipped(CHIP, *SIZE)


def test_a_file_of_another_product_is_not(sent_in):
    sent_in({**SYSTEM, "device": "NVIDIA H100"}, ANSWER)
    assert load() == PRODUCT.shipped(CHIP, *SIZE)


def test_what_the_user_measured_goes_before_it(sent_in):
    sent_in(SYSTEM, ANSWER)
    shipped = str(PRODUCT.shipped(CHIP, *SIZE))
    choice_cache.write(SYSTEM, {DECISION: Measured(shipped, 9.0, 9.0)})
    assert load() == PRODUCT.shipped(CHIP, *SIZE)


def test_a_file_that_is_fit_to_ship_is_said_to_be(sent_in, capsys):
    assert tuned.main([str(sent_in(SYSTEM, ANSWER))]) == 0
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
def test_a_file_that_is_not_fit_is_refused_with_the_reason(sent_in, capsys, change, complaint):
    file = sent_in(SYSTEM, ANSWER)
    content = json.loads(file.read_text())
    (content if {"chip", "format"} & change.keys() else content["answers"][0]).update(change)
    file.write_text(json.dumps(content))
    assert tuned.main([str(file)]) == 1
    assert complaint in capsys.readouterr().out


def test_every_file_that_ships_is_fit():
    assert [c for file in choice_cache.SHIPPED.glob("*.json") for c in tuned.complaints(file)] == []
