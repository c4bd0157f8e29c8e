"""Tables of tiles: parsing, completeness, no unused cells."""

import contextlib
import dataclasses
import importlib
import itertools
import pkgutil
import re
from unittest import mock

import pytest

import fasttfm.kernels.tiles
from fasttfm.kernels.chip import CHIPS, INTERPRETER
from fasttfm.kernels.tiles import table as tables
from fasttfm.kernels.tiles.table import Table, Tile, relative

ROOT = "fasttfm.kernels.tiles."
NAMES = [module.name for module in pkgutil.iter_modules(fasttfm.kernels.tiles.__path__)]
TABLES = {
    f"{name}.{variable}": table
    for name in NAMES
    for variable, value in vars(importlib.import_module(ROOT + name)).items()
    if isinstance(table := getattr(value, "shipped", value), Table)
}


def answering(name):
    """(chip, cell) for every size in the rows of a table, with every version of Triton that it names."""
    table = TABLES[name]
    parts = [{value for size in table.sizes for value in size[i]} - {"*"} for i in range(len(table.parts))]
    sizes = [*itertools.product([*CHIPS.values(), INTERPRETER], *([*sorted(part), "any"] for part in parts))]
    for version in {(3, 7), *re.findall(r"(\d+)\.(\d+)", " ".join(table.compilers))}:
        with mock.patch.object(tables, "compiler", lambda version=version: tuple(map(int, version))):
            for chip, *size in sizes:
                with contextlib.suppress(ValueError):
                    yield chip, table.cell(chip, *size)


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_a_table_is_an_answer(name):
    table = TABLES[name]
    dead = table.answers.keys() - {cell for _, cell in answering(name)}
    assert not dead, [(table.sizes[row], table.chips[column]) for row, column in sorted(dead)]


@pytest.mark.parametrize(
    "name", [name for name in TABLES if name.startswith("rows.") or name.endswith("MASKED_SOFTMAX")]
)
def test_a_tile_of_rows_has_an_element_for_every_thread(name):
    """With fewer, several warps hold copies: in-place writes race with reads, and sums of copies in different orders
    are stored at one address (triton#7264), so that results are not deterministic."""
    for chip, cell in answering(name):
        tile = TABLES[name].answers[cell]
        assert max(1, tile.rows) * tile.columns >= tile.warps * chip.warp, (chip, tile)


@pytest.mark.parametrize(
    ("name", "capability", "nearest"),
    [
        ("sm_53", 53, "sm_60"),
        ("sm_61", 61, "sm_60"),
        ("sm_90", 90, "sm_90"),
        ("sm_121", 121, "sm_120"),
        ("gfx1100", 0, "gfx1100"),
    ],
)
def test_a_chip_outside_of_the_matrix_counts_as_its_nearest_relative(name, capability, nearest):
    assert relative(dataclasses.replace(CHIPS["sm_80"], name=name, capability=capability)) == nearest


TABLE = Table(
    """
    kind       | sm_86,sm_89  sm_90+  simt  amd
    fp16,bf16  | 1            -       -     -
    fp32       | -            -       3     -
    *          | -            2       -     4   # a reason
    """,
    int,
)


@pytest.mark.parametrize(
    ("chip", "kind", "rows"),
    [("sm_86", "bf16", 1), ("sm_90", "fp32", 2), ("sm_120", "fp16", 2), ("sm_60", "fp32", 3), ("gfx942", "fp16", 4)],
)
def test_the_first_matching_cell_is_the_answer(chip, kind, rows):
    assert TABLE(CHIPS[chip], kind) == rows


@pytest.mark.parametrize(("version", "rows"), [((3, 5), 1), ((3, 7), 2), ((3, 9), 1), ((3, 10), 1), ((4, 0), 1)])
def test_a_row_applies_to_the_versions_of_triton_that_it_lists(monkeypatch, version, rows):
    monkeypatch.setattr(tables, "compiler", lambda: version)
    assert Table("kind | *\nfp32 | 1 @ 3.5,3.9+\nfp32 | 2", int)(CHIPS["sm_80"], "fp32") == rows


@pytest.mark.parametrize(
    ("text", "tile"),
    [("64x32w4s2", Tile(64, 32, 4, 2)), ("128x64x32w8s3", Tile(128, 64, 8, 3, 32)), ("512w1s1", Tile(0, 512, 1))],
)
def test_a_tile_is_formatted_as_it_is_parsed(text, tile):
    assert Tile.parse(text) == tile
    assert str(tile) == text
    assert Tile.parse(text.removesuffix("s1")) == tile
