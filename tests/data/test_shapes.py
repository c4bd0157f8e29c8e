"""Padded sizes for a corpus, their batches, and batches by length alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttfm.data.shapes import SIZES, choose_sizes, length_batches, plan_batches, round_length

PAIRS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=300)


@given(PAIRS, st.integers(60, 300), st.integers(1, 9))
@settings(max_examples=60)
def test_every_pair_is_in_one_batch_and_fits_its_size(pairs, max_tokens, most):
    lengths = np.array(pairs)
    sizes = choose_sizes(*lengths.T, max_tokens, most)
    assert len(sizes) <= most
    plan = plan_batches(*lengths.T, sizes, max_tokens)
    assert sorted(plan.order.tolist()) == list(range(len(pairs)))
    assert len(plan.bounds) == len(plan.sizes) + 1
    for begin, end, size in zip(plan.bounds[:-1], plan.bounds[1:], plan.sizes, strict=True):
        assert (lengths[plan.order[begin:end]] <= size).all()
        assert 0 < (end - begin) * size.max() <= max_tokens
    assert plan.shapes <= 2 * most


def test_a_large_corpus_of_long_sentences_uses_a_coarser_grid():
    random = np.random.default_rng(6)
    source, target = random.integers(1, 257, (2, 50_000))
    sizes = choose_sizes(source, target, 4096)
    assert len(sizes) == SIZES
    plan = plan_batches(source, target, sizes, 4096)
    assert 1 - (source + target).sum() / plan.cells.sum() < 0.2


def test_grid_lengths_are_few_and_at_most_an_eighth_longer():
    assert [round_length(n) for n in (1, 7, 16, 17, 18, 19, 32, 33, 64, 65)] == [1, 7, 16, 18, 18, 20, 32, 36, 64, 72]
    grid = {round_length(n) for n in range(1, 1025)}
    assert len(grid) == 16 + 8 * 6
    assert all(n <= round_length(n) < 1.125 * n for n in range(1, 5000))


@given(st.lists(st.integers(1, 300), max_size=80), st.integers(8, 200))
@settings(max_examples=60)
def test_batches_by_length_cover_every_sentence_longest_first(lengths, max_tokens):
    batches = length_batches(lengths, max_tokens)
    assert sorted(position for batch in batches for position in batch) == list(range(len(lengths)))
    seen = [lengths[position] for batch in batches for position in batch]
    assert seen == sorted(seen, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * round_length(max(lengths[position] for position in batch)) <= max_tokens
    full = [(len(batch), round_length(lengths[batch[0]])) for batch in batches[:-1]]
    assert len(set(full)) == len({width for _, width in full}), "the number of rows depends on the length alone"


@pytest.mark.parametrize("max_tokens", [64, 65, 100])
def test_no_size_exceeds_the_budget(max_tokens: int):
    lengths = np.array([[max_tokens, 1], [max_tokens - 1, max_tokens], [3, 3]])
    sizes = choose_sizes(*lengths.T, max_tokens)
    assert sizes.max() == max_tokens
    assert len(plan_batches(*lengths.T, sizes, max_tokens).sizes) >= 2
