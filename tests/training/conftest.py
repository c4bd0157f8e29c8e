"""Fixtures: a tiny corpus and recipe, which train in a second or two."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fasttfm.config import RunConfig, Values, build, gather
from fasttfm.cpu.step_passes import usable
from fasttfm.data.prepare import PrepareOptions, prepare
from fasttfm.data.prepared import PreparedData

from . import ranks
from .tiny import TINY

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS = [*NUMBERS, "red", "green", "blue", "big", "small", "house", "tree", "dog", "cat", "bird"]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data: 200 training and 12 validation pairs; targets are reversed sources."""
    folder = tmp_path_factory.mktemp("tiny")
    draw = random.Random(1)
    for name, pairs in (("train", 200), ("valid", 12)):
        sources = [draw.choices(WORDS, k=draw.randint(2, 9)) for _ in range(pairs)]
        for side, lines in (("src", sources), ("tgt", [words[::-1] for words in sources])):
            (folder / f"{name}.{side}").write_text("".join(" ".join(words) + "\n" for words in lines))
    files = [[folder / f"{name}.{side}"] for name in ("train", "valid") for side in ("src", "tgt")]
    prepare(*files, folder / "DATA", PrepareOptions(vocab_size=64, byte_fallback=False), say=lambda line: None)
    return folder / "DATA"


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> Callable[..., tuple[list[list[int]], str]]:
    """ranks.run_ranks(), with numba if installed, or as the test's parameter says."""
    numba = getattr(request, "param", usable())
    if numba and not usable():
        pytest.skip("numba is not installed")
    return partial(ranks.run_ranks, numba=numba)


@pytest.fixture
def tiny_values():
    """Factory of the tiny recipe's values, with any fields changed."""

    def make(**changes: object) -> Values:
        return gather(overrides={**TINY, **changes})

    return make


@pytest.fixture
def tiny_config(tiny_data: Path, tiny_values):
    """Factory of the tiny recipe's configuration for the tiny data."""

    def make(**changes: object) -> RunConfig:
        return build(tiny_values(**changes), {"vocab_size": len(PreparedData.open(tiny_data).target_tokenizer)})

    return make
