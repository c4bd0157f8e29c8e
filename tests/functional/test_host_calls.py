"""How many functions a call on a GPU calls on the host, case by case: `python -m benchmarks host --counts`, bounded."""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from fasttfm.system.children import child_environment


class Bound(NamedTuple):
    calls: int
    """At most so many functions of Python and C, and at least half: lower it when a call takes fewer."""
    goal: int | None = None
    """Where it is to come."""


BOUNDS = {
    "attention, no gradient": Bound(22),
    "attention, forward + backward": Bound(101),
    "attention, lengths and dropout, forward + backward": Bound(100),
    "attention, mask, forward + backward": Bound(103),
    "packed_qkv_attention, lengths and dropout, forward + backward": Bound(101),
    "varlen_attention, forward + backward": Bound(105),
    "layer_norm, forward + backward": Bound(92, 80),
    "residual_layer_norm, dropout, forward + backward": Bound(100),
    "feed_forward, dropout, forward + backward": Bound(118),
    "linear_cross_entropy, forward + backward": Bound(77),
    "embed, dropout, forward + backward": Bound(88, 80),
    "nn.MultiheadAttention, forward + backward": Bound(178),
    "nn.TransformerEncoderLayer, forward + backward": Bound(424),
    "nn.TransformerDecoder, a step with its cache, 6 layers": Bound(214),
    "layer_norm in float32, forward + backward": Bound(92, 80),
    "a launch alone, layer_norm": Bound(4),
    "a launch alone, attention": Bound(4),
    "a training step, 6 + 6 layers, bfloat16": Bound(4_270),
    "a step of a search without its graph, beam 1": Bound(150),
    "a step of a search without its graph, beam 4": Bound(150),
}


def beyond(rows: dict[str, dict], bounds: dict[str, Bound]) -> list[str]:
    """What calls more functions than its bound allows, or so few that the bound would not notice much."""
    return [
        f"{what}: {row['calls']} calls, bound {bounds[what].calls}"
        for what, row in rows.items()
        if "absent" not in row and not bounds[what].calls / 2 <= row["calls"] <= bounds[what].calls
    ]


@pytest.fixture(scope="module")
def rows():
    """Of a process of its own: whether Triton interprets kernels is settled when it is imported."""
    command = [sys.executable, "-m", "benchmarks", "host", "--counts", "--json", "--device", "cpu"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {row["what"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_calls_stay_within_their_bounds(rows):
    assert list(rows) == list(BOUNDS)
    assert beyond(rows, BOUNDS) == []


def test_every_call_took_the_way_of_a_gpu(rows):
    assert [what for what, row in rows.items() if "absent" not in row and not row["triton"]] == []
    assert {row["peer"] for row in rows.values() if row.get("peer_triton")} <= {"Triton", "Liger Kernel"}


def test_one_call_beyond_a_bound_is_noticed(rows):
    name = "layer_norm, forward + backward"
    more = {name: rows[name] | {"calls": BOUNDS[name].calls + 1}}
    assert beyond(more, BOUNDS) == [f"{name}: 93 calls, bound 92"]
    tight = {name: Bound(rows[name]["calls"] - 1)}
    assert len(beyond({name: rows[name]}, tight)) == 1
    assert beyond({name: rows[name]}, {name: Bound(rows[name]["calls"])}) == []


def test_goals_lie_below_their_bounds():
    assert all(bound.goal is None or bound.goal <= bound.calls for bound in BOUNDS.values())
