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


def assembled(text: str, target: str, folder: Path) -> subprocess.CompletedProcess:
    """What Triton's newest assembler says, or its other one of what the newest has forgotten."""
    name = "ptxas" if target in ("sm_60", "sm_70", "sm_90a") else "ptxas-blackwell"
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not shutil.which(str(assembler)):
        pytest.skip(f"this Triton comes without {name}")
    (folder / "one.ptx").write_text(text)
    command = [str(assembler), "-v", "-arch", target, "-o", "/dev/null", str(folder / "one.ptx")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_page_has_the_table_as_the_code_makes_it_and_tells_how_many_forms_there_are():
    """`ptx-check --table` prints it."""
    page = PAGE.read_text()
    found = re.search(r"<!-- chips: [^>]*-->\n\n(.*?)\n\n<!-- end of chips -->", page, re.DOTALL)
    assert found is not None
    assert found[1] == table()
    assert f"{len(accepted() | carrying()):,}" in page


@pytest.mark.parametrize("chip", CHIPS)
def test_the_assembler_takes_what_a_chip_is_said_to_have_and_nothing_else(chip, tmp_path):
    target = chip + ("a" if chip in ("sm_90", "sm_100", "sm_120") else "")
    head = HEAD.format(name="probe", target=target, threads=32, parameters="")
    having = [family for family in FAMILIES if family.on(chip)]
    done = assembled(head + "".join(f"{family.example};\n" for family in having) + "ret;\n}\n", target, tmp_path)
    assert done.returncode == 0, done.stderr[:500]
    for family in FAMILIES:
        if family not in having:
            done = assembled(f"{head}{family.example};\nret;\n}}\n", target, tmp_path)
            assert done.returncode != 0, family.name
