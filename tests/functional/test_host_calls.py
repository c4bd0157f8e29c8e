"""Bounds on the host's function calls per GPU call: `python -m benchmarks host --counts`."""

import json
import subprocess
import sys

import pytest

from fasttfm.system.children import child_environment

BOUNDS = {
    "attention, no gradient": 19,
    "attention, forward + backward": 96,
    "attention, lengths and dropout, forward + backward": 95,
    "attention, mask, forward + backward": 98,
    "packed_qkv_attention, lengths and dropout, forward + backward": 96,
    "varlen_attention, forward + backward": 100,
    "layer_norm, forward + backward": 84,
    "residual_layer_norm, dropout, forward + backward": 92,
    "feed_forward, dropout, forward + backward": 110,
    "linear_cross_entropy, forward + backward": 69,
    "embed, dropout, forward + backward": 80,
    "nn.MultiheadAttention, forward + backward": 173,
    "nn.TransformerEncoderLayer, forward + backward": 416,
    "nn.TransformerDecoder, a step with its cache, 6 layers": 214,
    "layer_norm in float32, forward + backward": 84,
    "a launch alone, layer_norm": 4,
    "a launch alone, attention": 4,
    "a training step, 6 + 6 layers, bfloat16": 4_130,
    "a step of a search without its graph, beam 1": 150,
    "a step of a search without its graph, beam 4": 150,
}
"""Upper bounds of Python and C function calls. Lower one when a call takes fewer: below half, a bound misses
regressions."""


@pytest.fixture(scope="module")
def rows():
    """From a process of its own: Triton decides at import whether it interprets kernels."""
    command = [sys.executable, "-m", "benchmarks", "host", "--counts", "--json", "--device", "cpu"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {row["what"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_calls_stay_within_their_bounds(rows):
    assert list(rows) == list(BOUNDS)
    calls = {what: row["calls"] for what, row in rows.items() if "absent" not in row}
    beyond = {what: (n, BOUNDS[what]) for what, n in calls.items() if not BOUNDS[what] / 2 <= n <= BOUNDS[what]}
    assert not beyond
    assert calls


def test_every_call_launched_triton_kernels(rows):
    assert [what for what, row in rows.items() if "absent" not in row and not row["triton"]] == []
    assert {row["peer"] for row in rows.values() if row.get("peer_triton")} <= {"Triton", "Liger Kernel"}
