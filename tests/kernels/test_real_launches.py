"""Triton's own launch path, which the interpreter goes around: what a training run makes it compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("chip", "kind"), [("sm_90", "bf16"), ("sm_60", "fp32"), ("gfx942", "fp16")])
def test_a_batch_of_another_shape_compiles_nothing_anew(chip, kind):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("stand_in.py")
    done = subprocess.run(
        [sys.executable, script, chip, kind], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    launches, compiled = (int(word) for word in done.stdout.split() if word.isdigit())
    assert launches > 1500
    assert compiled < 100
