"""Launches on a device, which the interpreter goes around: what Triton is made to compile, and what is started."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest


def run(script: str, *arguments: str) -> str:
    """What a script beside this one prints; it runs on its own because here Triton is in its interpreter."""
    words = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = forked.run(words, popen=forked.BarePopen, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize(("chip", "kind"), [("sm_90", "bf16"), ("sm_60", "fp32"), ("gfx942", "fp16")])
def test_a_batch_of_another_shape_compiles_nothing_anew(chip, kind):
    launches, compiled = (int(word) for word in run("what_compiles.py", chip, kind).split() if word.isdigit())
    assert launches > 1500
    assert compiled < 100


def test_a_kernel_that_was_launched_before_is_started_with_the_arguments_of_now():
    assert run("launched_again.py") == "23 launches, 10 of them by Triton\n"


def test_a_specialised_kernel_in_gluon_is_a_case_that_compiles_as_it_is_launched():
    told = json.loads(run("gluon_case.py"))
    order = "B A H4 | W0 B"
    assert told == {
        "registers": 168,  # 12 warps' share, from which consumers take
        "matrix": 8,
        "broken": [],
        "loops": [128.0, 128.0],  # the consumers': the producer multiplies nothing
        "orders": [order, order],
        "counted again": True,
        "as launched": True,
        "last cells": [order, order, ""],
    }
