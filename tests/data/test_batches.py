"""Batches: token budget, order, padding, the content of the tensors, and updates as even as random pairs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttfm.data.batches import TokenBatches, collate
from fasttfm.data.epochs import mixed_order, side_by_side
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.shapes import SIZES

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=120)


def pairs_of(lengths) -> ParallelTokens:
    """Pair i consists of the id 4 + i."""
    return ParallelTokens.from_lists(
        [[4 + i] * source for i, (source, _) in enumerate(lengths)],
        [[4 + i] * target for i, (_, target) in enumerate(lengths)],
    )


def natural_pairs(count: int) -> ParallelTokens:
    random = np.random.default_rng(0)
    source = np.clip(random.gamma(4, 3.5, count).astype(int), 1, 100)
    target = np.clip((source * random.normal(1.05, 0.2, count)).astype(int), 1, 120)
    return pairs_of(list(zip(source, target, strict=True)))


@given(LENGTHS, st.integers(41, 200), st.integers(0, 5))
@settings(max_examples=60)
def test_an_epoch_has_every_pair_once_and_no_batch_exceeds_the_budget(lengths, max_tokens, epoch):
    batches = TokenBatches(pairs_of(lengths), max_tokens, seed=1)
    order = batches.epoch(epoch)
    assert sorted(i for indices in order for i in indices) == list(range(len(lengths)))
    assert len(order) == len(batches)
    for indices in order:
        batch = batches.batch(indices)
        assert max(batch.source.numel(), batch.target_in.numel()) <= max_tokens
        assert len(batch) * max(batch.source.shape[1], batch.target_in.shape[1]) <= max_tokens


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed: int, *epochs: int) -> list[list[int]]:
        batches = TokenBatches(natural_pairs(500), 400, seed)
        return [[indices.tolist() for indices in batches.epoch(epoch)] for epoch in epochs][-1]

    assert order(1, 3) == order(1, 3) == order(1, 0, 3)
    assert order(1, 3) != order(1, 4)
    assert order(1, 3) != order(2, 3)


def test_batches_do_not_come_sorted_by_length_and_their_members_change():
    batches = TokenBatches(natural_pairs(3000), 500, 1)
    first, second = batches.epoch(0), batches.epoch(1)
    widths = [batches.batch(indices).source.shape[1] for indices in first]
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.2
    groups, others = ({frozenset(indices.tolist()) for indices in each} for each in (first, second))
    assert len(groups & others) < len(first) / 2


@pytest.mark.parametrize(("max_tokens", "most"), [(512, 0.12), (2048, 0.08), (4096, 0.09)])
def test_every_epoch_has_the_same_few_dozen_shapes_and_little_padding(max_tokens: int, most: float):
    batches = TokenBatches(natural_pairs(20_000), max_tokens, 1)
    first, second = ([batches.batch(indices, epoch) for indices in batches.epoch(epoch)] for epoch in (0, 1))
    shapes = {batch.shape for batch in first}
    assert len(shapes) == batches.shapes <= SIZES + 2
    assert {batch.shape for batch in second} == shapes
    assert sum(map(len, first)) == 20_000
    real = sum(batch.source_tokens + batch.target_tokens for batch in first)
    assert batches.padding_ratio == pytest.approx(1 - real / sum(batch.cells for batch in first))
    assert batches.padding_ratio < most
    largest = batches.batch(batches.largest()).cells
    assert all(max(batch.cells for batch in epoch) == largest for epoch in (first, second))


def test_long_pairs_are_skipped_and_counted():
    lengths = [(5, 5), (60, 5), (5, 60), (30, 30), (99, 99)]
    batches = TokenBatches(pairs_of(lengths), max_tokens=70, max_length=30)
    assert batches.skipped == 3
    assert sorted(i for indices in batches.epoch(0) for i in indices) == [0, 3]
    assert batches.target_tokens == 6 + 31
    # 69 tokens and eos fill the budget
    assert TokenBatches(pairs_of([(69, 1), (70, 1)]), max_tokens=70).skipped == 1
    with pytest.raises(ValueError, match="fits batches of 8"):
        TokenBatches(pairs_of([(20, 20)]), max_tokens=8)


def test_a_batch_has_shifted_targets_and_zeros_elsewhere():
    sides = [[7, 8, 9], [5], []], [[10], [11, 12], [13]]
    batch, padded = collate(*sides), collate(*sides, (6, 4))
    assert batch.source.tolist() == [[7, 8, 9, 3], [5, 3, 0, 0], [3, 0, 0, 0]]
    assert batch.source_lengths.tolist() == padded.source_lengths.tolist() == [4, 2, 1]
    assert batch.target_in.tolist() == [[2, 10, 0], [2, 11, 12], [2, 13, 0]]
    assert batch.target_out.tolist() == [[10, 3, 0], [11, 12, 3], [13, 3, 0]]
    assert batch.target_lengths.tolist() == padded.target_lengths.tolist() == [2, 3, 2]
    assert (batch.source_tokens, batch.target_tokens, len(batch)) == (7, 7, 3)
    assert batch.padding_ratio == pytest.approx(7 / 21)
    assert (batch.shape, padded.shape) == ((3, 4, 3), (3, 6, 4))
    for name, width in (("source", 4), ("target_in", 3), ("target_out", 3)):
        assert getattr(padded, name)[:, :width].equal(getattr(batch, name))
        assert not getattr(padded, name)[:, width:].any()
    for name in ("source", "target_in", "target_out", "source_lengths", "target_lengths"):
        assert getattr(batch, name).dtype == torch.int64
        assert getattr(batch.to("cpu"), name).equal(getattr(batch, name))


def test_every_update_has_each_part_also_across_epochs():
    lengths = np.arange(50)
    stream = np.concatenate([mixed_order(lengths, 8, epoch * 50, np.random.default_rng(epoch)) for epoch in range(4)])
    for update in stream.reshape(25, 8):
        assert np.abs(np.sort(update) - (np.arange(8) + 0.5) * 50 / 8).max() < 7
    assert all(sorted(stream[50 * e : 50 * e + 50]) == list(range(50)) for e in range(4))
    pairs = natural_pairs(3000)
    alone = [pairs.target_lengths[each].mean() for each in TokenBatches(pairs, 400, together=4).epoch(0)]
    assert np.reshape(alone[: len(alone) // 4 * 4], (-1, 4)).mean(axis=1).std() < np.std(alone) / 4  # drawn: half


def test_halves_and_quarters_of_an_update_have_equal_sums():
    order = side_by_side(8)
    assert order.reshape(2, 4).sum(axis=1).tolist() == [14, 14]
    assert order.reshape(4, 2).sum(axis=1).tolist() == [7] * 4
