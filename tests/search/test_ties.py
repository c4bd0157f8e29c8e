"""Ties: the better hypothesis comes first, then the lower token; every search and top-k against the rule in Python."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba_passes import skip_without

from fasttfm.cpu import step_passes
from fasttfm.search import beam, search_ids
from fasttfm.search.beam import Beams
from fasttfm.search.constraints import Constraints
from fasttfm.search.device.search import DeviceSearch
from fasttfm.search.tasks import Waiting, tasks_of
from fasttfm.search.top_k import top_k

from .device_tables import search_by
from .table_model import EOS, TableCache, TableModel, Tied, by_hand, config

SOURCES = [[number, EOS] for number in range(20, 32)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(params=["numba", "torch", "device"])
def passes(request, monkeypatch):
    """The implementation that chooses tokens."""
    if request.param == "device":
        search_by(monkeypatch, DeviceSearch)
        return
    skip_without(request.param)
    if request.param == "torch":
        monkeypatch.setattr(step_passes, "takes", lambda x: False)


def sources_of(model):
    return SOURCES[: 4000 // model.vocab_size]


def found(model, settings, **options):
    return [[each.tokens for each in some] for some in search_ids(model, sources_of(model), settings, **options)]


def expected(model, settings):
    return [[tokens for _, tokens in by_hand(model, source, 4, settings)] for source, _ in sources_of(model)]


@pytest.mark.parametrize("moves_nothing", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        *({"beam": beam} for beam in (2, 3, 4, 5)),
        {"beam": 5, "early_stopping": True},
        {"beam": 4, "diverse_beam_groups": 2, "diverse_beam_strength": 128.0},
        {"beam": 6, "diverse_beam_groups": 3, "diverse_beam_strength": 64.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [5, 14, 1300])  # 5: fewer than a beam; 1300: several blocks
def test_beams(passes, monkeypatch, vocab_size, changes, moves_nothing):
    monkeypatch.setattr(TableCache, "moves_nothing", moves_nothing, raising=False)
    model, settings = Tied(vocab_size), config(**changes, nbest=changes["beam"], length_penalty="avg", max_len_b=4)
    assert found(model, settings) == expected(model, settings)


def test_excluded_endings_do_not_count_for_early_stopping(passes, monkeypatch):
    """One word, and a beam of five: endings come among the best before they are allowed."""
    monkeypatch.setattr(TableCache, "moves_nothing", True, raising=False)
    results = found(Tied(5), config(beam=5, nbest=5, early_stopping=True, min_len=5))
    assert all(sorted(some) == [[4] * 5, [4] * 6] for some in results)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("excluded", [0.0, 0.9, 1.0], ids=lambda share: f"{share} excluded")
@pytest.mark.parametrize("vocab_size", [5, 40])
def test_the_compiled_choice_is_pytorchs(monkeypatch, vocab_size, excluded, early_stopping):
    """Ends that enter and that do not, few values, tokens that are excluded, and NaN."""
    skip_without("numba")
    model, draw = TableModel(vocab_size), torch.Generator().manual_seed(7)
    settings = config(beam=3, early_stopping=early_stopping, max_len_b=9)

    def beams():
        tasks = tasks_of(model, [Waiting(number, [number + 4, EOS]) for number in range(6)], settings)
        return Beams(tasks, Constraints(settings, torch.device("cpu")), in_order=True)

    def state(steps, logits):
        rows, ended = steps.extend(logits)
        finished = [[each.best() for each in some] for some in (ended, steps.tasks)]
        return str((rows.tolist(), steps.tokens.tolist(), steps.scores.tolist(), steps.history.tolist(), finished))

    both = beams(), beams()
    for step in range(5):
        logits = torch.randint(-3, 3, (len(both[0].tokens), vocab_size), generator=draw).float()
        logits[:, EOS] += torch.randint(0, 4, (len(logits),), generator=draw)
        logits[torch.rand(logits.shape, generator=draw) < excluded] = -torch.inf
        logits[:, -1] = 0.0
        logits[-1] += torch.nan if step == 2 else 0.0
        states = []
        for steps, compiled in zip(both, (True, False), strict=True):
            ways = SimpleNamespace(takes=lambda x, compiled=compiled: compiled, loops=step_passes.loops)
            monkeypatch.setattr(beam, "step_passes", ways)
            states.append(state(steps, logits.clone()))
        assert states[0] == states[1]
        if not both[0].tasks:
            break


def greedy_by_hand(model, source: int, longest: int) -> list[int]:
    target: tuple[int, ...] = ()
    while len(target) < longest:
        logits = model.logits(source, target)
        token = max(range(EOS, model.vocab_size), key=logits.__getitem__)
        if token == EOS:
            break
        target = (*target, token)
    return list(target)


@pytest.mark.parametrize("vocab_size", [14, 1300])
def test_greedy_search(passes, vocab_size):
    model = Tied(vocab_size)
    model.likely = -128.0  # no token is certain
    actual = found(model, config(beam=1))
    assert actual == [[greedy_by_hand(model, source, 6)] for source, _ in sources_of(model)]


@pytest.mark.parametrize(("topk", "topp"), [(0, 1.0), (3, 1.0), (0, 0.7), (5, 0.5)])
@pytest.mark.parametrize("vocab_size", [14, 1300])
def test_sampling(passes, vocab_size, topk, topp):
    model = Tied(vocab_size)
    chosen = {"sampling_topk": topk, "sampling_topp": topp, "temperature": 128.0}
    actual = found(model, config(sampling=True, sampling_seed=7, **chosen, nbest=4, max_len_b=3))
    for number, ((source, _), outputs) in enumerate(zip(sources_of(model), actual, strict=True)):
        uniform = np.random.default_rng([7, number]).random((4, 4))
        drawn = set()
        for row in range(4):
            output: tuple[int, ...] = ()
            while len(output) < 3:
                values = model.logits(source, output)
                best = sorted(range(EOS, vocab_size), key=lambda token: -values[token])[: topk or None]  # stable
                mass = np.cumsum(np.exp([values[token] / 128 for token in best]))
                last = int(np.searchsorted(mass, topp * mass[-1]))  # the fewest that reach p
                token = best[int(np.searchsorted(mass[: last + 1], uniform[len(output), row] * mass[last], "right"))]
                if token == EOS:
                    break
                output = (*output, token)
            drawn.add(output)
        assert set(map(tuple, outputs)) == drawn


def by_rule(values: torch.Tensor, k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda place: -row[place])[:k] for row in values.tolist()]  # stable


@pytest.mark.sample(15)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 64, 1024, 1217, 8000])  # by blocks from 1024 on; 1217 leaves a tail
@pytest.mark.parametrize("k", [1, 5, 8])
def test_equal_values_are_ordered_by_index(width, k, dtype):
    draw = torch.Generator().manual_seed(width * k)
    levels = torch.randn(40, generator=draw)
    few = [levels[:count][torch.randint(count, (7, width), generator=draw)] for count in (1, 3, 40)]
    rare = torch.full((7, width), -torch.inf).index_fill_(1, torch.tensor([width - 1, width // 2, 3]), 0.0)
    differ = torch.randn(7, width, generator=draw)
    zeros, columns = torch.zeros(7, width).copysign(differ), differ.t().contiguous().t()
    for values in (*few, rare, differ, torch.cat([differ, few[1]]), zeros, columns):
        values = values.to(dtype)
        best, places = top_k(values, k)
        assert places.tolist() == by_rule(values, k)
        assert torch.equal(best, values.gather(1, places))
    assert top_k(few[1], width)[1].tolist() == by_rule(few[1], width)


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("width", [8, 8000])
def test_nan_is_largest_and_other_devices_are_not_read(width, k):
    values = torch.zeros(3, width)
    values[1, 2:] = torch.nan
    assert top_k(values, k)[0].isnan().tolist() == [[False] * k, [True] * k, [False] * k]
    # A meta tensor has no values to read.
    assert [part.shape for part in top_k(values.to("meta"), k)] == [(3, k), (3, k)]


@pytest.mark.skipif(not step_passes.usable(), reason="numba is not installed")
@pytest.mark.parametrize("k", [1, 5])
def test_the_compiled_pass_finds_the_likeliest_anywhere(k):
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(k))
    logits[1] = logits[1].round()
    logits[2] = logits[2] * 1e-9  # equal as log-probabilities
    best, tokens = step_passes.likeliest(logits, k, lambda values: None)
    expected = logits.log_softmax(1)
    torch.testing.assert_close(best, expected.gather(1, tokens))
    assert tokens.tolist() == by_rule(expected, k)
