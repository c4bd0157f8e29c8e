"""Windows and macOS, planted: what they lack is missing here for a test. Neither system itself was tried."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("platform", "missing"),
    [("win32", ["fcntl", "resource", "pwd", "grp", "termios", "triton"]), ("darwin", ["triton"])],
)
def test_the_package_is_imported_on_a_platform_without_these_modules(platform, missing):
    code = (
        "import sys; import torch, sacrebleu, sentencepiece, requests, multiprocessing.pool\n"
        f"sys.modules.update(dict.fromkeys({missing!r})); sys.platform = {platform!r}\n"
        "import os\n"
        f"for name in ('fork', 'killpg', 'sched_getaffinity') if {platform == 'win32'} else ('sched_getaffinity',):\n"
        "    delattr(os, name) if hasattr(os, name) else None\n"
        "import fasttfm.nn, fasttfm.models, fasttfm.search, fasttfm.training.run, fasttfm.cli.main\n"
        "from fasttfm.models import Transformer\n"
        "Transformer.from_preset('demo', vocab_size=50).loss(*[torch.randint(4, 50, (2, 5))] * 3)[0].backward()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
