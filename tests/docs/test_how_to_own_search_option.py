"""docs/how-to-own-search-option.md: its edits in a copy of the package, and its test with and without them."""

import re
import shutil
import subprocess
import sys

from .blocks import DOCS, blocks

PAGE = "how-to-own-search-option.md"


def test_the_edits_of_the_page_make_an_option_that_its_test_notices(tmp_path):
    root = DOCS.parent
    shutil.copytree(root / "fasttfm", tmp_path / "fasttfm", ignore=shutil.ignore_patterns("__pycache__"))
    text = (DOCS / PAGE).read_text(encoding="utf-8")
    before, *parts = re.split(r"^```diff\n", text, flags=re.MULTILINE)
    files = [re.findall(r"`(fasttfm/[\w/]+\.py)`", part)[-1] for part in (before, *parts[:-1])]
    [test] = blocks(PAGE)
    assert len(parts) == 4

    def ends(words: list[str]) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)

    test = f"import torch; torch.manual_seed(1)\n{test}"
    assert "unexpected keyword argument 'no_double'" in ends(["-c", test]).stderr
    for file, part in zip(files, parts):
        edit = part[: part.index("```")]
        before = "".join(line[1:] for line in edit.splitlines(keepends=True) if line[0] == " ")
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, (file, before)
        after = "".join(line[1:] for line in edit.splitlines(keepends=True))
        (tmp_path / file).write_text(text.replace(before, after), encoding="utf-8")
    done = ends(["-c", test])
    assert done.returncode == 0, done.stderr
    assert "--no-double" in ends(["-m", "fasttfm", "translate", "--help-all"]).stdout
