"""The table of what each chip has and the machine executes."""

import re
from pathlib import Path

import pytest

from ptx_check.forms import accepted, carrying
from ptx_check.support import table

PAGE = Path(__file__).parents[2] / "docs" / "ptx.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs the repository's documentation")


def test_the_page_has_the_table_as_the_code_makes_it_and_tells_how_many_forms_there_are():
    """`ptx-check --table` prints it."""
    page = PAGE.read_text()
    found = re.search(r"<!-- chips: [^>]*-->\n\n(.*?)\n\n<!-- end of chips -->", page, re.DOTALL)
    assert found is not None
    assert found[1] == table()
    assert f"{len(accepted() | carrying()):,}" in page
