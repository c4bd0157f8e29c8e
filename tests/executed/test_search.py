"""The PTX of a beam search step, executed: equal to choice.py, no access out of bounds for any state."""

import copy
import itertools
import random

import pytest
import torch
from executing import CHIPS as SOME
from mutants import kept_launches
from test_mutations import assert_most_are_noticed
from test_search_kernels import DTYPES, EOS, Step, assert_equal_states, drawn_logits, embedded, filled, in_the_middle

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import PAD
from fasttfm.kernels import search
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.executed import executed
from fasttfm.kernels.tiles.rows import SEARCH_SHARES
from fasttfm.search.device import choice
from fasttfm.search.device.state import NEVER, Settings, Sizes

SIZES = Sizes(slots=3, beam=4, nbest=3, steps=5, sources=9, places=4, vocabulary=1100)
EVERY_TILE = [
    SIZES, SIZES._replace(slots=2, beam=9, nbest=9, vocabulary=4097),
    SIZES._replace(slots=130, beam=2, nbest=2, places=140, vocabulary=99),
    SIZES._replace(slots=1, vocabulary=20_000), SIZES._replace(slots=1, beam=8, nbest=8, vocabulary=33_000),
]  # fmt: skip
LAUNCHED = ["_admit", "_likeliest", "_choose"]


def steps(sizes, dtype, count):
    """Runs steps of a search by kernels and by choice.py, and compares the states."""
    draw = random.Random(5)
    expected = filled(sizes, draw)
    rules = choice.Rules(expected, DecodingConfig(), [], selects=True)
    rules.selected.copy_(torch.rand(rules.selected.shape) < 0.9)
    actual = copy.deepcopy(expected)
    step = Step(actual, drawn_logits(sizes, draw, dtype), rules.never)
    for _ in range(count):
        choice.admit(expected)
        step.admit()
        busy, logits = expected.sentence < sizes.places, drawn_logits(sizes, draw, dtype)
        values = choice.log_probabilities(expected, logits, rules)
        choice.choose_beams(expected, values)
        step.choose(logits, rules.never, rules.selected)
        assert_equal_states(expected, actual, busy)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("chip", "dtype"), [*zip((*SOME, "sm_100"), itertools.cycle(DTYPES)),
                                             *(("sm_90", dtype) for dtype in DTYPES[1:])])  # fmt: skip
@pytest.mark.parametrize("sizes", EVERY_TILE, ids=lambda sizes: f"{sizes.slots}x{sizes.beam}")
def test_steps_equal_the_operations_of_torch(chip, dtype, sizes, monkeypatch):
    if sizes.beam == 9:
        monkeypatch.setattr(search, "share_tile", lambda *size: SEARCH_SHARES(CHIPS[chip], 4096))
    with executed(chip) as machine:
        steps(sizes, dtype, 3)
    assert [launch.name for launch in machine.launches] == LAUNCHED * 3


@pytest.mark.sample(1)
@pytest.mark.parametrize(("chip", "dtype"), list(zip(SOME, itertools.cycle(DTYPES))))
def test_embedding_of_the_newest_tokens(chip, dtype):
    with executed(chip):
        out, wanted = embedded(dtype)
    torch.testing.assert_close(out[:4], wanted)
    assert out[4:].isnan().all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("far", [-(1 << 40), -1, 1 << 40])
def test_invalid_states_lead_to_no_access_out_of_bounds(far):
    """Each field of the state in turn; the machine stops at an address outside of the tensors."""
    logits, refused = torch.randn(SIZES.rows, SIZES.vocabulary), torch.zeros(SIZES.vocabulary, dtype=torch.bool)
    table, positions, out = torch.randn(SIZES.vocabulary, 24), torch.randn(SIZES.steps, 24), torch.empty(SIZES.rows, 24)
    with executed("sm_80"):
        for name in ("sentence", "position", "newest", "ended", "queue", "head", "tail", "settings", "forced"):
            state = filled(SIZES, random.Random(0))
            step = Step(state, logits, refused)
            step.admit()
            getattr(state, name).fill_(far)
            step.choose(logits, refused, None)
            step.admit()
            search.Embed(table, positions, step.sizes, 1.0, PAD)(step.memory, table, positions, out)


@pytest.mark.executed
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("chip", "dtype"), list(zip(("sm_60", "sm_80", "sm_90", "sm_100"), itertools.cycle(DTYPES))))
def test_most_mutations_are_noticed(chip, dtype, record_property, monkeypatch):
    """Many slots, some of which take a sentence; and one slot with many shares, all of whose rows continue."""
    monkeypatch.setattr(search, "share_tile", lambda *size: SEARCH_SHARES(CHIPS[chip], 1024))
    many = filled(SIZES._replace(slots=120, places=150), random.Random(0))
    many.sentence[torch.rand(120) < 0.5] = 3
    many.head.fill_(100)
    many.tail.fill_(150)
    sizes = Sizes(slots=1, beam=7, nbest=5, steps=150, sources=9, places=2, vocabulary=30_000)
    one = filled(sizes, random.Random(0))
    in_the_middle(one, random.Random(0))
    one.position.fill_(100)
    one.settings[:] = torch.tensor(Settings(149, 0, beam=7, nbest=5, enough=NEVER, ranks=14, source=1, number=1))
    one.scores.copy_(torch.rand(7) / 10)
    one.found_scores.mul_(100.0)  # so low that none of them ends the search
    # A third of the shares of each row dominates: a wrong maximum then overflows, where a near one would give the same
    # sum. Every row has a token that is chosen.
    high = torch.rand(7, 30).argsort(1).argsort(1) < 10
    logits = torch.randn(7, 30, 1024) - torch.where(high, 0.0, 300.0)[..., None]
    logits, refused = logits.view(7, -1)[:, : sizes.vocabulary].to(dtype), torch.rand(sizes.vocabulary) < 0.1
    logits.scatter_(1, logits.argmax(1, keepdim=True), 6.0)
    logits[::3, EOS] = 6.0

    def call():
        Step(many, logits, refused).admit()
        embedded(dtype)
        Step(one, logits, refused).choose(logits, refused, None)

    assert_most_are_noticed(kept_launches(call, chip), "a search's step", chip, dtype, record_property)
