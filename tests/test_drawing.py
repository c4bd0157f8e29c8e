"""Drawing needs no display and ignores matplotlib's settings and special characters in paths."""

import os
import sys

import pytest
from forked import run

SCRIPT = """
import json, os, sys
from pathlib import Path
from fasttfm.training.plots import plot_curve
records = [{"kind": "train", "step": s, "nll": 3.0, "seconds": 1.0} for s in (1, 2)]
folder = Path(os.fsdecode(sys.argv[1]))
folder.mkdir()
(folder / "train.log.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records))
assert plot_curve(folder).read_bytes().startswith(b"\\x89PNG")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "environment", "settings"),
    [
        ("M", {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}, None),
        ("M", {"MPLBACKEND": "nonsense"}, None),
        ("M", {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}, None),
        ("M", {}, b"backend: nonsense\nfigure.dpi: many\n\xff\xfe\n"),
        ("M", {}, b"text.usetex: True\n"),
        ("run$_{$b", {}, None),
        ("run_\\frac", {}, None),
        (b"caf\xe9", {}, None),
        ("翻訳 перевод", {}, None),
    ],
    ids=["inline", "no backend", "no home", "bad file", "latex", "mathtext", "backslash", "latin1", "no glyphs"],
)
def test_a_curve_is_drawn_without_warnings(tmp_path, name, environment, settings):
    if settings is not None:
        (tmp_path / "matplotlibrc").write_bytes(settings)
    try:
        done = run(
            [sys.executable, "-c", SCRIPT, name],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
    except OSError:
        pytest.skip("the file system does not support this name")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
