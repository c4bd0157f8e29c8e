"""The problems meet every tile that the tables of attention name, on whatever chip they run. Needs no device."""

import pytest

from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.attention_case import WIDTHS, product_kinds
from fasttfm.kernels.tiles.attention import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD, SHORT_BACKWARD, SHORT_FORWARD

from .problems import ATTENTION

LONG = (FORWARD, BACKWARD_QUERIES, BACKWARD_KEYS)
SHORT = (SHORT_FORWARD, SHORT_BACKWARD)


def tiles(chip, kind, width, extras, keys):
    """(choice, width, tile) of every kernel that may serve such a call."""
    width = max(64, width)
    if not attention_launch.takes_long(chip, kind, width):
        return set()  # the softmax route takes it
    results = {(choice.name, width, choice.shipped(chip, kind, width, extras)) for choice in LONG}
    if attention_launch.fits_short(chip, kind, width, keys):
        results |= {(choice.name, width, choice.shipped(chip, kind, width, extras, keys)) for choice in SHORT}
    return results


@pytest.mark.parametrize("chip", CHIPS)
def test_the_problems_meet_every_tile_of_attention(chip):
    classes = {(attention_launch.width_class(p.width), p.extras, attention_launch.key_class(p.keys)) for p in ATTENTION}
    for kind in product_kinds(CHIPS[chip]):
        met = set().union(*(tiles(CHIPS[chip], kind, *size) for size in classes))
        named = set().union(
            *(
                tiles(CHIPS[chip], kind, width, extras, keys)
                for width in WIDTHS
                for extras in (0, 1, 2, 4)
                for keys in (16, 32, 64, 128, 256)
            )
        )
        assert not named - met, f"{kind}: {sorted(map(str, named - met))}"


def test_the_problems_meet_every_size_class_of_rows():
    assert {attention_launch.key_class(p.keys) for p in ATTENTION} >= {16, 32, 64, 128, 256, 512, 2048, 4096}
