"""Mutations of the kernels' PTX: a check that never fails proves nothing, so each kind of fault must be noticed.

The share of noticed mutations, among those that make a difference to some thread, is printed (pytest -s) and must not
fall below LEAST. Missed ones change nothing that is stored: equal sizes of two sums, shuffles among padding rows.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from executing import solving
from gpu.problems import Problem, _attention, _feed_forward, _norms
from mutants import MOST, OUTCOMES, kept_launches, mutants
from search_step import a_step, attend


def _far_from_zero(problem: Problem) -> Problem:
    """The problem with rows of scores up to 200 away from 0, and in every seventh row one score 300 above the others.

    Softmax does not depend on the maximum that it subtracts, unless it overflows: so a wrong maximum shows.
    """

    def inputs(device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        made = problem.inputs(device, dtype)
        mask = made["mask"].float()
        rows = torch.arange(mask.shape[-2])
        mask += 100.0 * (rows % 5 - 2)[:, None]
        chosen = rows[1::7]
        mask[..., chosen, 7 * chosen % (chosen + 1)] += 300
        return {**made, "mask": mask.to(dtype)}

    return replace(problem, inputs=inputs)


def _step_of_a_search(dtype: torch.dtype) -> Callable[[], Any]:
    """Scores far from 0 in every third row, heads that do not fill a tile; a key read past the last one shows."""
    joint, *given = a_step([138, 64, 26, 106, 58, 0], 4, 2, 40, dtype, 140)
    joint[::3, :80] *= 60.0
    return partial(attend, joint, *given)


PROBLEMS = {
    "attention, long rows": _attention(1, 1, 127, 300, 64, 64, causal=True, causal_offset=150, mask="bool", p=0.1),
    "attention, short rows": _far_from_zero(_attention(1, 1, 23, 27, 64, 64, mask="add", p=0.1)),
    "masked softmax": _far_from_zero(_attention(1, 1, 45, 77, 64, 64, mask="add", causal=True, p=0.1)),
    "layer norm": _norms(203, 500, 0.1)[1],
    "feed-forward": _feed_forward(150, 100, 200, 0.1),
}
SUBJECTS = [
    (name, chip, dtype)
    for name, on_sm_60, dtype_of_others in (
        ("attention, long rows", None, torch.bfloat16),
        ("attention, short rows", torch.float16, torch.bfloat16),
        ("masked softmax", torch.float16, torch.float32),
        ("layer norm", torch.float32, torch.bfloat16),
        ("feed-forward", torch.float16, torch.bfloat16),
        ("step of a search", torch.float16, torch.bfloat16),
    )
    for chip in ("sm_60", "sm_80", "sm_90", "sm_100")
    if (dtype := on_sm_60 if chip == "sm_60" else dtype_of_others) is not None
]
LEAST = 0.85
"""Share of noticed mutations that every subject must reach."""


@pytest.mark.executed
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "chip", "dtype"), SUBJECTS, ids=[f"{name} {chip}" for name, chip, _ in SUBJECTS])
def test_most_mutations_are_noticed(name, chip, dtype, record_property):
    is_step = name == "step of a search"
    run = _step_of_a_search(dtype) if is_step else solving(PROBLEMS[name], dtype)
    launches = kept_launches(run, chip)
    assert_most_are_noticed(launches, name, chip, dtype, record_property, each=12 if is_step else MOST)


def assert_most_are_noticed(launches, name, chip, dtype, record_property, *, each=MOST):
    """Runs mutants of each launch, up to `each` of a kind, and records how many were noticed."""
    total: Counter = Counter()
    for launch in launches:
        for mutant in mutants(launch.ptx, each):
            outcome = launch.outcome(mutant)
            total[outcome] += 1
            if outcome == "missed":
                print(f"{launch.name}: {mutant.kind}, line {mutant.line}: {launch.line(mutant.line)}")
    subject = {"subject": name, "chip": chip, "dtype": str(dtype).removeprefix("torch.")}
    record_property("mutations", json.dumps({**subject, **{outcome: total[outcome] for outcome in OUTCOMES}}))
    share = total["noticed"] / (total["noticed"] + total["missed"])
    print(f"{name}, {chip}: {share:.0%} noticed, {dict(total)}")
    assert total["noticed"] > 30
    assert share >= LEAST
