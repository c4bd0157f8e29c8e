"""Bounds on the host's function calls per GPU call: `python -m benchmarks host --counts`."""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from fasttfm.system.children import child_environment


class Bound(NamedTuple):
    calls: int
    """Upper bound of Python and C function calls; half of it is a lower bound. Lower it when a call takes fewer."""
    goal: int | None = None
    """Target."""


BOUNDS = {
    "attention, no gradient": Bound(19),
    "attention, forward + backward": Bound(96),
    "attention, lengths and dropout, forward + backward": Bound(95),
    "attention, mask, forward + backward": Bound(98),
    "packed_qkv_attention, lengths and dropout, forward + backward": Bound(96),
    "varlen_attention, forward + backward": Bound(100),
    "layer_norm, forward + backward": Bound(84, 80),
    "residual_layer_norm, dropout, forward + backward": Bound(92),
    "feed_forward, dropout, forward + backward": Bound(110),
    "linear_cross_entropy, forward + backward": Bound(69),
    "embed, dropout, forward + backward": Bound(80, 80),
    "nn.MultiheadAttention, forward + backward": Bound(173),
    "nn.TransformerEncoderLayer, forward + backward": Bound(416),
    "nn.TransformerDecoder, a step with its cache, 6 layers": Bound(214),
    "layer_norm in float32, forward + backward": Bound(84, 80),
    "a launch alone, layer_norm": Bound(4),
    "a launch alone, attention": Bound(4),
    "a training step, 6 + 6 layers, bfloat16": Bound(4_130),
    "a step of a search without its graph, beam 1": Bound(150),
    "a step of a search without its graph, beam 4": Bound(150),
}


def beyond(rows: dict[str, dict], bounds: dict[str, Bound]) -> list[str]:
    """Cases above their bound, or so far below that the bound would miss a regression."""
    return [
        f"{what}: {row['calls']} calls, bound {bounds[what].calls}"
        for what, row in rows.items()
        if "absent" not in row and not bounds[what].calls / 2 <= row["calls"] <= bounds[what].calls
    ]


@pytest.fixture(scope="module")
def rows():
    """From a process of its own: Triton decides at import whether it interprets kernels."""
    command = [sys.executable, "-m", "benchmarks", "host", "--counts", "--json", "--device", "cpu"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {row["what"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_calls_stay_within_their_bounds(rows):
    assert list(rows) == list(BOUNDS)
    assert beyond(rows, BOUNDS) == []


def test_every_call_launched_triton_kernels(rows):
    assert [what for what, row in rows.items() if "absent" not in row and not row["triton"]] == []
    assert {row["peer"] for row in rows.values() if row.get("peer_triton")} <= {"Triton", "Liger Kernel"}


def test_one_call_beyond_a_bound_is_noticed(rows):
    name = "layer_norm, forward + backward"
    more = {name: rows[name] | {"calls": BOUNDS[name].calls + 1}}
    assert beyond(more, BOUNDS) == [f"{name}: 85 calls, bound 84"]
    tight = {name: Bound(rows[name]["calls"] - 1)}
    assert len(beyond({name: rows[name]}, tight)) == 1
    assert beyond({name: rows[name]}, {name: Bound(rows[name]["calls"])}) == []


def test_goals_lie_below_their_bounds():
    assert all(bound.goal is None or bound.goal <= bound.calls for bound in BOUNDS.values())
