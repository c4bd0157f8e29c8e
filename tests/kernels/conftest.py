"""The fixture of the tests of attention kernels."""

import pytest

from fasttfm import functional as F
from fasttfm.functional.operator import forget_plans
from fasttfm.kernels import masked_softmax
from fasttfm.kernels.attention import backward, forward, launch, mask_gradient, short
from fasttfm.kernels.tiles.table import Tile


@pytest.fixture
def take(monkeypatch):
    """take(route) selects the route of every attention call in the test, with tiles so small that there are several."""
    wide, high = Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)
    for module, name, tile in (
        (forward, "FORWARD", high),
        (backward, "BACKWARD_QUERIES", wide),
        (backward, "BACKWARD_KEYS", high),
        (backward, "BACKWARD_HEADS", wide),
        (mask_gradient, "MASK_GRADIENT", high),
        (masked_softmax, "MASKED_SOFTMAX", Tile(16, 16, 4, 1)),
    ):
        monkeypatch.setattr(module, name, lambda *a, tile=tile: tile)
    monkeypatch.setattr(masked_softmax, "ONE_PASS", 16)  # longer rows take two passes
    for name in ("SHORT_FORWARD", "SHORT_BACKWARD"):
        monkeypatch.setattr(short, name, lambda *size: Tile(16, size[-1], 4, 1))

    def go(route):
        one = route == "heads"
        monkeypatch.setattr(launch, "route", lambda *a: "flash" if one else route)
        monkeypatch.setattr(backward, "LAUNCHES", lambda *a: 1 if one else 2)
        forget_plans()

    with F.backend("triton"):
        yield go
