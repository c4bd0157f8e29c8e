"""Tables of tiles: read as they are written, complete, without a row that nothing asks for."""

import dataclasses
import importlib
import itertools
import pkgutil

import pytest

import fasttfm.kernels.tiles
from fasttfm.kernels.chip import CHIPS, INTERPRETER
from fasttfm.kernels.tiles.table import Table, relative

ROOT = "fasttfm.kernels.tiles."
NAMES = [module.name for module in pkgutil.iter_modules(fasttfm.kernels.tiles.__path__)]
TABLES = {
    f"{name}.{variable}": table
    for name in NAMES
    for variable, table in vars(importlib.import_module(ROOT + name)).items()
    if isinstance(table, Table)
}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_a_table_is_the_answer_to_something(name):
    table = TABLES[name]
    values = [{value for row in table.rows for value in row.cells[i]} for i in range(1, len(table.columns))]
    others = [[*sorted(cell - {"*"}), "any"] for cell in values]
    asked = itertools.product([*CHIPS.values(), INTERPRETER], *others)
    taken = {next((i for i, row in enumerate(table.rows) if row.fits(chip, size)), None) for chip, *size in asked}
    dead = [row for i, row in enumerate(table.rows) if i not in taken]
    assert not dead, "\n".join(map(str, dead))


@pytest.mark.parametrize(
    "name", [name for name in TABLES if name.startswith("rows.") or name.endswith("MASKED_SOFTMAX")]
)
def test_a_tile_of_rows_has_an_element_for_every_thread(name):
    """With fewer, threads of several warps hold copies: some read what another overwrites in place, and sums of copies
    that were added up in different orders are stored at one place (triton#7264), so that two runs may differ."""
    table = TABLES[name]
    values = [{value for row in table.rows for value in row.cells[i]} for i in range(1, len(table.columns))]
    for chip, *size in itertools.product(CHIPS.values(), *values):
        tile = next((row.answer for row in table.rows if row.fits(chip, size)), None)
        if tile is not None:
            assert getattr(tile, "rows", 1) * tile.columns >= tile.warps * (32 if chip.capability else 64), (chip, tile)


@pytest.mark.parametrize(
    ("name", "capability", "stands_for"),
    [
        ("sm_53", 53, "sm_60"),
        ("sm_61", 61, "sm_60"),
        ("sm_87", 87, "sm_86"),
        ("sm_90", 90, "sm_90"),
        ("sm_103", 103, "sm_100"),
        ("sm_121", 121, "sm_120"),
        ("gfx1100", 0, "gfx1100"),
    ],
)
def test_a_chip_that_no_table_names_goes_with_its_nearest_relative(name, capability, stands_for):
    assert relative(dataclasses.replace(CHIPS["sm_80"], name=name, capability=capability)) == stands_for


TABLE = Table(
    int,
    """
    chips          kind       | rows
    sm_86,sm_89    fp16,bf16  | 1
    sm_90+         *          | 2   # a reason
    simt           fp32       | 3
    amd            *          | 4
    """,
)


@pytest.mark.parametrize(
    ("chip", "kind", "rows"),
    [("sm_86", "bf16", 1), ("sm_90", "fp32", 2), ("sm_120", "fp16", 2), ("sm_60", "fp32", 3), ("gfx942", "fp16", 4)],
)
def test_the_first_row_that_fits_holds(chip, kind, rows):
    assert TABLE(CHIPS[chip], kind) == rows


def test_a_size_that_no_row_lists_is_named():
    with pytest.raises(ValueError, match="no tile is listed for sm_86, kind tf32"):
        TABLE(CHIPS["sm_86"], "tf32")


@pytest.mark.parametrize("row", ["sm_80 | 1", "sm_80 fp32 1", "sm_99 fp32 | 1"])
def test_a_row_that_says_too_little_or_names_no_chip_is_refused(row):
    with pytest.raises(ValueError, match="a row of a table of tiles is"):
        Table(int, f"chips kind | rows\n{row}")
