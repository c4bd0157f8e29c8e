"""The table of what each chip has and the machine executes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import triton
from ptx_text import HEAD

from ptx_check import CHIPS
from ptx_check.forms import accepted, carrying
from ptx_check.support import FAMILIES, table

PAGE = Path(__file__).parents[2] / "docs" / "ptx.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs the repository's documentation")


def test_the_page_has_the_table_as_the_code_makes_it():
    """`ptx-check --table` prints it."""
    found = re.search(r"<!-- chips: [^>]*-->\n\n(.*?)\n\n<!-- end of chips -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == table()


def test_the_page_tells_how_many_forms_there_are():
    assert f"{len(accepted() | carrying()):,}" in PAGE.read_text()


@pytest.mark.parametrize("chip", CHIPS)
def test_the_assembler_takes_what_a_chip_is_said_to_have_and_nothing_else(chip, tmp_path):
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    if chip in ("sm_60", "sm_70"):  # the newest assembler has forgotten them
        assembler = assembler.with_name("ptxas")
    if not shutil.which(str(assembler)):
        pytest.skip(f"this Triton comes without {assembler.name}")
    target = chip + ("a" if chip in ("sm_90", "sm_100", "sm_120") else "")
    head = HEAD.format(name="probe", target=target, threads=32, parameters="")
    for family in FAMILIES:
        (tmp_path / "one.ptx").write_text(f"{head}{family.example};\nret;\n}}\n")
        command = [str(assembler), "-arch", target, "-o", "/dev/null", str(tmp_path / "one.ptx")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == bool(family.on(chip)), (family.name, done.stderr[:500])
