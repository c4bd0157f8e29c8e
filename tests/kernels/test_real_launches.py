"""Launches without the interpreter, with a stand-in for the device: what Triton compiles, and what is started."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest


def run(script: str, *arguments: str) -> str:
    """The output of a script in this folder, in a process without Triton's interpreter."""
    words = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = forked.run(words, popen=forked.BarePopen, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.whole
@pytest.mark.parametrize(("chip", "kind"), [("sm_90", "bf16"), ("sm_60", "fp32"), ("gfx942", "fp16")])
def test_a_batch_of_another_shape_recompiles_nothing(chip, kind):
    launches, compiled = (int(word) for word in run("what_compiles.py", chip, kind).split() if word.isdigit())
    assert launches > 1500
    assert compiled < 100


def test_a_cached_kernel_is_started_with_the_current_arguments():
    assert run("launched_again.py") == "23 launches, 10 of them by Triton\n"


def test_a_warp_specialized_gluon_kernel_compiles_as_a_case_as_it_is_launched():
    output = json.loads(run("gluon_case.py"))
    order = "B A H4 | W0 B"
    assert output == {
        "registers": 168,  # the share of 12 warps, from which consumers take more
        "matrix": 8,
        "broken": [],
        "loops": [128.0, 128.0],  # of the consumers; the producer has no products
        "orders": [order, order],
        "counted again": True,
        "as launched": True,
        "last cells": [order, order, ""],
    }
