"""Which cases `make test` runs (the marks sample and whole)."""

from types import SimpleNamespace

import pytest
from shared_fixtures import left_out


def case(name, mark=None, *values):
    """What left_out() reads of a case; values: of each axis."""
    ids = f"[{'-'.join(values)}]" if values else ""
    return SimpleNamespace(
        nodeid=f"tests/test_cases.py::{name}{ids}",
        callspec=SimpleNamespace(_idlist=list(values)),
        get_closest_marker=lambda asked: mark.mark if mark is not None and mark.name == asked else None,
    )


def test_the_gate_has_so_many_cases_with_every_value():
    pairs = [case("test_pairs", pytest.mark.sample(4), a, b) for a in "0123" for b in "xyz"]
    always, long = case("test_always"), case("test_long", pytest.mark.whole)
    left = left_out([*pairs, always, long])
    assert long in left
    assert always not in left
    chosen = [each.callspec._idlist for each in pairs if each not in left]
    assert [len(set(values)) for values in zip(*chosen, strict=True)] == [4, 3]
    free = [case("test_free", None, a, b, c) for a in "01234" for b in "xyz" for c in "pq"]
    chosen = [each.callspec._idlist for each in free if each not in left_out(free)]
    assert [len(set(values)) for values in zip(*chosen, strict=True)] == [len(chosen), 3, 2] == [5, 3, 2]
