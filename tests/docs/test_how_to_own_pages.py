"""docs/how-to-own-search-option.md and -model.md: their tests fail before and pass after their edits."""

import os
import shutil
import sys

import forked
import pytest

from .blocks import DOCS, blocks, make_edits

ROOT = DOCS.parent
COMMANDS = """
import shlex, sys
from fasttfm.cli.main import main
sys.exit(next((status for line in sys.stdin if (status := main(shlex.split(line)[1:]))), 0))
"""
NO_LOOPS = "import sys; sys.modules['numba'] = None\n"
"""In a copy of the tree all loops would be compiled again."""
SMALL = "--max-update 2 --warmup-updates 0 --d-model 16 --heads 2 --d-ff 16 --row-length 32 --max-tokens 512"


@pytest.fixture
def typed(tmp_path):
    """typed(code, text): finished process of Python code with a copy of the tree."""
    for name in ("fasttfm", "pretraining/src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    paths = os.pathsep.join([str(tmp_path), str(tmp_path / "pretraining" / "src")])

    def run(code, text=""):
        options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": paths}, "capture_output": True, "text": True}
        return forked.run([sys.executable, "-c", NO_LOOPS + code], input=text, popen=forked.BarePopen, **options)

    return run


@pytest.mark.parametrize(
    ("page", "edits", "missing", "words"),
    [
        ("how-to-own-search-option.md", 4, "unexpected keyword argument 'no_double'", "--no-double"),
        ("how-to-own-model.md", 7, "No module named 'fasttfm_pretraining.config.looped'", "bits per byte"),
    ],
)
def test_the_edits_of_a_page_add_what_its_test_needs(page, edits, missing, words, typed, tmp_path):
    test = f"import torch; torch.manual_seed(1)\n{blocks(page)[-1]}"
    assert missing in typed(test).stderr
    assert make_edits(page, tmp_path) == edits
    done = typed(test)
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.txt").write_text("".join(f"Once upon a time there were {n} mice.\n\n" for n in range(300)))
    lines = "".join(blocks(page, "")).replace("--preset looped-tiny", f"--preset looped-tiny {SMALL}")
    done = typed(COMMANDS, lines or "fasttfm translate --help-all\n")
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
