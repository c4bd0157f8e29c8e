"""The kernels of a beam search step in the interpreter against fasttfm/search/device/choice.py."""

import copy
import random

import pytest
import torch

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS, PAD
from fasttfm.kernels import search
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.tiles.table import Tile
from fasttfm.search.device import choice
from fasttfm.search.device.state import NEVER, Settings, Sizes, State

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF = float("inf")


pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of rows of NaN


@pytest.fixture
def small_shares(monkeypatch):
    monkeypatch.setattr(search, "share_tile", lambda *size: Tile(0, 16, 1))


class Step:
    """The launches of a step over a state."""

    def __init__(self, state, logits, refused):
        slots, beam, nbest, steps, _, places, vocabulary = state.sizes
        self.sizes = sizes = search.Sizes(slots, beam, nbest, steps, places, vocabulary)
        self.memory = search.Memory(*(getattr(state, name) for name in search.Memory._fields))
        self.shares = search.new_shares(sizes, state.device)
        self._admit = search.Admit(sizes, BOS, state.device)
        self._likeliest = search.Likeliest(logits, refused, sizes, EOS)
        self._choose = search.Choose(sizes, self.shares, EOS)

    def admit(self):
        self._admit(self.memory)

    def choose(self, logits, refused, selected):
        self._likeliest(self.memory, logits, refused, selected, self.shares)
        self._choose(self.memory, self.shares)


def filled(sizes, draw):
    """A state with various sentences, some of them queued."""
    state = State(sizes, torch.device("cpu"))
    for place in range(sizes.places):
        beam = draw.randint(1, sizes.beam)
        settings = Settings(
            limit=draw.randint(1, sizes.steps - 1), least=draw.choice([0, 2]), beam=beam,
            nbest=draw.randint(1, sizes.nbest), enough=draw.choice([1, beam, NEVER]),
            ranks=draw.choice([1, 2 * sizes.beam]), source=draw.randint(1, 9), number=100 + place,
        )  # fmt: skip
        state.settings[place] = torch.tensor(settings)
        for position in range(draw.choice([0, 0, 2])):
            state.forced[place, position] = draw.randrange(4, sizes.vocabulary)
        if draw.random() < 0.2:
            state.forced[place, settings.limit] = EOS
    state.divisors.copy_(torch.rand(state.divisors.shape) + 0.5)
    state.queue.copy_(torch.randperm(sizes.places))
    state.tail.fill_(draw.randint(1, sizes.places))
    return state


def in_the_middle(state, draw):
    """Puts slots into the middle of a search, with live and ended hypotheses."""
    slots, beam, nbest, steps, _, places, vocabulary = state.sizes
    taken = min(slots, places)
    state.sentence[:taken] = torch.randperm(places)[:taken]
    state.position[:taken] = 1 + (torch.rand(taken) * state.settings[state.sentence[:taken], 0]).long()
    state.ended[:taken] = draw.randrange(2)
    state.scores[:taken] = -torch.rand(taken, beam).cumsum(1)
    state.scores[:taken, draw.randint(1, beam) :] = -INF
    state.newest[:taken] = torch.randint(vocabulary, (taken, beam))
    state.ancestors.copy_(torch.randint(slots * beam * steps, state.ancestors.shape))
    full = draw.randint(0, nbest)
    state.found_scores[:-1, :full] = -torch.rand(places, full).cumsum(1) - 0.5
    state.found_ends[:-1, :full] = 7
    state.found_log_probabilities[:-1, :full] = state.found_scores[:-1, :full] * 2
    state.queue.copy_(torch.tensor(sorted(range(places), key=lambda place: (place in state.sentence, place))))
    state.tail.fill_(draw.randint(0, places - taken))


def drawn_logits(sizes, draw, dtype, values=(3, 50)):
    """Logits (R, V) with many ties within and between rows, some -inf and NaN."""
    slots, beam, vocabulary = sizes.slots, sizes.beam, sizes.vocabulary
    levels = (torch.randn(slots, beam, draw.choice(values)) * 3).to(dtype)
    ranks = torch.randint(levels.shape[2], (slots, beam, vocabulary))
    logits = levels.gather(2, ranks)
    if draw.random() < 0.6:
        logits[:] = logits[:, :1].clone()
    logits[torch.rand(logits.shape) < 0.1] = -INF
    logits[..., EOS] += torch.randint(0, 5, (slots, 1))
    for _ in range(draw.choice([0, 1, 2])):
        logits[draw.randrange(slots), draw.randrange(beam), draw.randrange(vocabulary)] = draw.choice([INF, -INF / INF])
    if draw.random() < 0.2:
        logits[draw.randrange(slots), draw.randrange(beam)] = -INF
    return logits.flatten(0, 1)


def assert_equal_states(expected, actual, busy):
    """busy: slots that searched. Rows without a hypothesis and the place of idle slots are not compared."""
    for name in ("sentence", "position", "source_lengths", "head"):
        assert torch.equal(getattr(expected, name), getattr(actual, name)), name
    for name in ("found_ends", "finished"):
        assert torch.equal(getattr(expected, name)[:-1], getattr(actual, name)[:-1]), name
    for name in ("found_scores", "found_log_probabilities"):
        a, b = (getattr(x, name)[:-1] for x in (expected, actual))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    slots = busy.nonzero()[:, 0]
    assert torch.equal(expected.ended[slots], actual.ended[slots])
    torch.testing.assert_close(expected.scores[slots], actual.scores[slots], rtol=1e-6, atol=1e-6)
    beam = expected.sizes.beam
    for slot in slots.tolist():
        live = expected.scores[slot] > -INF
        assert torch.equal(expected.newest[slot][live], actual.newest[slot][live])
        past = slice(0, expected.position[slot].item())
        ancestors = [x.ancestors.view(-1, beam, x.sizes.steps)[slot, live, past] for x in (expected, actual)]
        assert torch.equal(*ancestors)
        written = actual.newest[slot]
        assert ((written >= 0) & (written < actual.sizes.vocabulary)).all()


def assert_equal_writings(expected, actual, places, positions):
    """Compares the tokens and parents that a step has written for live hypotheses."""
    for slot, (place, position) in enumerate(zip(places.tolist(), positions.tolist(), strict=True)):
        if place < expected.sizes.places:
            live = expected.scores[slot] > -INF
            for name in ("tokens", "parents"):
                a, b = (getattr(x, name)[place, position, live] for x in (expected, actual))
                assert torch.equal(a, b), name


@pytest.mark.usefixtures("small_shares")
@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(60))
def test_steps_of_random_searches_equal_the_operations_of_torch(seed):
    draw = random.Random(seed)
    beam = draw.randint(1, 5)
    sizes = Sizes(
        slots=draw.randint(1, 5), beam=beam, nbest=draw.randint(1, beam), steps=draw.choice([3, 5, 9, 150]), sources=9,
        places=draw.randint(1, 7), vocabulary=draw.choice([5, 9, 16, 40, 100]),
    )  # fmt: skip
    dtype = DTYPES[seed % 3]
    expected = filled(sizes, draw)
    if seed % 2:
        in_the_middle(expected, draw)
    selects = draw.random() < 0.3
    rules = choice.Rules(expected, DecodingConfig(), [], selects=selects)
    if selects:
        rules.selected.copy_(torch.rand(rules.selected.shape) < 0.7)
    actual = copy.deepcopy(expected)
    logits = drawn_logits(sizes, draw, dtype)
    refused = rules.never if seed % 4 < 2 else rules.never.repeat(sizes.rows, 1)
    step = Step(actual, logits, refused)
    searched = 0
    for _ in range(12):
        choice.admit(expected)
        step.admit()
        busy, places, positions = (
            x.clone() for x in (expected.sentence < sizes.places, expected.sentence, expected.position)
        )
        assert_equal_states(expected, actual, busy)
        assert (actual.newest[busy & (positions == 0)] == BOS).all()
        logits = drawn_logits(sizes, draw, dtype)
        values = choice.log_probabilities(expected, logits, rules)
        idle = [x[~busy].clone() for x in (actual.scores, actual.newest, actual.ended)]
        choice.choose_beams(expected, values)
        step.choose(logits, refused, rules.selected)
        assert_equal_states(expected, actual, busy)
        assert_equal_writings(expected, actual, places, positions)
        for before, after in zip(idle, (actual.scores, actual.newest, actual.ended), strict=True):
            assert torch.equal(before, after[~busy])
        searched += int(busy.sum())
        following = expected.queue[expected.tail % sizes.places]
        if draw.random() < 0.3 and expected.tail - expected.head < sizes.places and following not in expected.sentence:
            for state in (expected, actual):
                state.tail += 1
    assert searched


def embedded(dtype):
    """Embeddings of tokens and positions, of which all but the first four are invalid, and the expected first four."""
    slots, beam, vocabulary, width, steps = 5, 2, 7, 600, 5
    state = State(Sizes(slots, beam, 1, steps, 9, 2, vocabulary), torch.device("cpu"))
    state.newest.copy_(torch.tensor([[1, PAD], [6, 2], [vocabulary, -1], [1, 1], [1, 1]]))
    state.position.copy_(torch.tensor([0, 4, 1, -1, steps]))
    table, positions = torch.randn(vocabulary, width).to(dtype), torch.randn(steps, width)
    memory = search.Memory(*(getattr(state, name) for name in search.Memory._fields))
    out = table.new_empty(slots * beam, width)
    embed = search.Embed(table, positions, search.Sizes(slots, beam, 1, steps, 2, vocabulary), 3.0, PAD)
    embed(memory, table, positions, out)
    expected = (table[state.newest[:2]].float() * 3.0 + positions[state.position[:2], None]).to(dtype)
    expected[state.newest[:2] == PAD] = 0.0
    return out, expected.view(-1, width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_of_the_newest_tokens(dtype):
    out, expected = embedded(dtype)
    eps = torch.finfo(dtype).eps  # the interpreter rounds bfloat16 towards zero
    torch.testing.assert_close(out[:4], expected, rtol=eps, atol=eps)
    assert out[4:].isnan().all()


def test_sizes_that_the_kernels_support():
    for beam, vocabulary, rows, fits in (
        (5, 37_000, 5, True), (16, 37_000, 160, True), (16, 5, 16, True), (5, 256_000, 5 * 1024, True),
        (5, 37_000, 5 * 1025, False), (17, 37_000, 17, False), (16, 256_000, 16, False), (1, 600_000, 1, False),
    ):  # fmt: skip
        assert search.takes(beam, vocabulary, rows) == fits
        for chip in CHIPS.values() if fits else ():
            columns = search.share_tile(chip, beam, vocabulary, rows).columns
            assert search._candidates(beam, vocabulary, columns)
