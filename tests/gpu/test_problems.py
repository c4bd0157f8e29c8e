"""The problems use every tile of the attention tables, on every chip. Needs no device."""

import itertools

import pytest

from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.attention_case import WIDTHS, product_kinds
from fasttfm.kernels.tiles.attention import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD, SHORT_BACKWARD, SHORT_FORWARD

from .problems import ATTENTION

LONG = (FORWARD, BACKWARD_QUERIES, BACKWARD_KEYS)
SHORT = (SHORT_FORWARD, SHORT_BACKWARD)


def tiles(chip, kind, width, extras, keys):
    """(choice, width, tile) of every kernel that supports this size class."""
    width = max(64, width)
    if not attention_launch.takes_long(chip, kind, width):
        return set()  # the route is softmax
    results = {(choice.name, width, choice.shipped(chip, kind, width, extras)) for choice in LONG}
    if attention_launch.fits_short(chip, kind, width, keys):
        results |= {(choice.name, width, choice.shipped(chip, kind, width, extras, keys)) for choice in SHORT}
    return results


@pytest.mark.parametrize("chip", CHIPS)
def test_the_problems_use_every_tile_of_attention(chip):
    classes = {(attention_launch.width_class(p.width), p.extras, attention_launch.key_class(p.keys)) for p in ATTENTION}
    sizes = list(itertools.product(WIDTHS, (0, 1, 2, 4), (16, 32, 64, 128, 256)))
    for kind in product_kinds(CHIPS[chip]):
        used, listed = (set().union(*(tiles(CHIPS[chip], kind, *size) for size in of)) for of in (classes, sizes))
        assert listed or kind == "fp32", kind
        assert not listed - used, f"{kind}: {sorted(map(str, listed - used))}"


def test_the_problems_use_every_size_class_of_rows():
    assert {attention_launch.key_class(p.keys) for p in ATTENTION} >= {16, 32, 64, 128, 256, 512, 2048, 4096}
