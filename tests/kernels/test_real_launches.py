"""Launches without the interpreter, with a stand-in for the device: what Triton compiles, and what is started."""

import json
import os
import sys
from pathlib import Path

import forked


def test_a_cached_kernel_gets_the_current_arguments_and_a_gluon_kernel_compiles_as_a_case_as_it_is_launched():
    words = [sys.executable, str(Path(__file__).with_name("as_launched.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = forked.run(words, popen=forked.BarePopen, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    output = json.loads(done.stdout)
    assert output["again"] == {"launches": 23, "by Triton": 10}
    order = "B A H4 | W0 B"
    assert output["gluon"] == {
        "registers": 168,  # the share of 12 warps, from which consumers take more
        "matrix": 8,
        "broken": [],
        "loops": [128.0, 128.0],  # of the consumers; the producer has no products
        "orders": [order, order],
        "counted again": True,
        "sources": [True, True, False, False],  # what the kernel names, without addresses and comments
        "as launched": True,
        "last cells": [order, order, ""],
    }
