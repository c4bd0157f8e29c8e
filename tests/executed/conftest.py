"""These tests execute the PTX of the kernels on a CPU, which needs Triton without its interpreter:

TRITON_INTERPRET=0 pytest tests/executed                    as `make test` does
TRITON_INTERPRET=0 pytest tests/executed -m executed        the rest, as `make executed` does
"""

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
import torch
from long_rows import PROCESSORS

from fasttfm.functional import backend
from fasttfm.kernels import choices
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.executed import executed
from fasttfm.kernels.tiles.table import Tile

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    chosen = "executed" in (config.option.markexpr or "")
    interpreted = pytest.mark.skip(reason="needs TRITON_INTERPRET=0; `make test` runs these on their own")
    long = pytest.mark.skip(reason="runs under `make executed`")
    for item in items:
        if HERE not in item.path.parents:
            continue
        if os.environ.get("TRITON_INTERPRET") != "0":
            item.add_marker(interpreted)
        elif item.get_closest_marker("executed") and not chosen:
            item.add_marker(long)


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def taking(monkeypatch):
    """taking(choices, tiles, or triton): a context in which a chip computes with these; yields the machine."""
    chips = {name: dataclasses.replace(CHIPS[name], processors=PROCESSORS) for name in ("sm_90", "sm_100")}
    for name, chip in chips.items():
        monkeypatch.setitem(CHIPS, name, chip)

    @contextlib.contextmanager
    def take(made, *tiles, name="sm_90", **options):
        for choice, tile in zip(made, tiles, strict=True):
            answer = tile if tile == "triton" else Tile.parse(tile)
            monkeypatch.setattr(choice, "shipped", lambda *size, answer=answer: answer)
        choices.keep(chips[name], {})
        with executed(name, **options) as machine, backend("triton"):
            yield machine

    yield take
    for chip in chips.values():
        choices.keep(chip, {})
