"""Memory of ranks: the command's record."""

import json
import sys

import pytest

from tests import forked


@pytest.mark.whole
def test_two_ranks_hold_half_the_state_each(tmp_path):
    words = [sys.executable, "-m", "benchmarks.ranks", "--ranks", "1", "2", "--results", str(tmp_path)]
    forked.run(words, check=True)
    one, two = json.loads((tmp_path / "ranks.jsonl").read_text())["measured"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["state"] == pytest.approx(one["state"] / 2, rel=0.01)
    assert two["state"] < two["peak"] < one["peak"]
