"""Drawing needs no display and ignores matplotlib's settings and special characters in paths."""

import os
import sys

from forked import run

SCRIPT = """
import json, os
from pathlib import Path
from fasttfm.training.plots import plot_curve
records = [{"kind": "train", "step": s, "nll": 3.0, "seconds": 1.0} for s in (1, 2)]
for name in ("run$_{$b", "run_\\\\frac", os.fsdecode(b"caf\\xe9"), "翻訳 перевод"):
    folder = Path(name)
    folder.mkdir()
    (folder / "train.log.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records))
    assert plot_curve(folder).read_bytes().startswith(b"\\x89PNG")
"""


def test_a_curve_is_drawn_without_warnings(tmp_path):
    (tmp_path / "matplotlibrc").write_bytes(b"backend: nonsense\nfigure.dpi: many\ntext.usetex: True\n\xff\xfe\n")
    environment = {**os.environ, "MPLBACKEND": "nonsense", "HOME": "/proc/nowhere", "XDG_CACHE_HOME": ""}
    done = run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
