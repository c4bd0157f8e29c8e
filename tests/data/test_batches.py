"""Batches: the budget, the order, the padding, and what a batch's tensors hold."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttfm.data.batches import TokenBatches, collate, pad_sentences
from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.shapes import SIZES
from fasttfm.data.tokenizer import EOS

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=120)


def pairs_of(lengths) -> ParallelTokens:
    """Pairs whose ids tell which pair they are from."""
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


def test_the_order_follows_from_seed_and_epoch_alone():
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [list(map(int, indices)) for indices in TokenBatches(natural_pairs(500), 400, seed).epoch(epoch)]

    assert order(1, 3) == order(1, 3)
    assert order(1, 3) != order(1, 4)
    assert order(1, 3) != order(2, 3)
    batches = TokenBatches(natural_pairs(500), 400, 1)
    batches.epoch(0)
    assert [list(map(int, indices)) for indices in batches.epoch(3)] == order(1, 3)


def test_batches_do_not_come_sorted_by_length_and_their_members_change():
    batches = TokenBatches(natural_pairs(3000), 500, 1)
    first, second = batches.epoch(0), batches.epoch(1)
    widths = [batches.batch(indices).source.shape[1] for indices in first]
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.2
    groups = {frozenset(map(int, indices)) for indices in first}
    assert len(groups & {frozenset(map(int, indices)) for indices in second}) < len(first) / 2


@pytest.mark.parametrize(("max_tokens", "most"), [(2048, 0.08), (4096, 0.09)])
def test_padding_is_little_and_reported_as_it_is(max_tokens: int, most: float):
    batches = TokenBatches(natural_pairs(20_000), max_tokens, 1)
    total = real = 0
    for indices in batches.epoch(0):
        batch = batches.batch(indices)
        total += batch.source.numel() + batch.target_in.numel()
        real += batch.source_tokens + batch.target_tokens
    assert batches.padding_ratio == pytest.approx(1 - real / total)
    assert batches.padding_ratio < most


def shapes(batches: TokenBatches, epoch: int) -> set[tuple[int, int, int]]:
    return {batches.batch(indices, epoch).shape for indices in batches.epoch(epoch)}


@pytest.mark.parametrize("max_tokens", [512, 2048, 4096])
def test_every_epoch_has_the_same_few_dozen_shapes(max_tokens: int):
    batches = TokenBatches(natural_pairs(20_000), max_tokens, 1)
    first = shapes(batches, 0)
    assert len(first) == batches.shapes <= SIZES + 2
    assert shapes(batches, 1) == first
    rows = [len(indices) for indices in batches.epoch(0)]
    assert sum(rows) == 20_000


def test_the_largest_batch_is_known_before_training():
    batches = TokenBatches(natural_pairs(2000), 600, 1)

    def size(indices) -> int:
        batch = batches.batch(indices)
        return batch.source.numel() + batch.target_in.numel()

    largest = size(batches.largest())
    for epoch in (0, 1, 7):
        assert max(map(size, batches.epoch(epoch))) == largest


def test_long_pairs_are_skipped_and_counted():
    lengths = [(5, 5), (60, 5), (5, 60), (30, 30), (99, 99)]
    batches = TokenBatches(pairs_of(lengths), max_tokens=70, max_length=30)
    assert batches.skipped == 3
    assert sorted(i for indices in batches.epoch(0) for i in indices) == [0, 3]
    assert batches.target_tokens == 6 + 31
    # 69 tokens and eos fill the budget, 70 would exceed it.
    assert TokenBatches(pairs_of([(69, 1), (70, 1)]), max_tokens=70).skipped == 1
    with pytest.raises(ValueError, match="fits batches of 8"):
        TokenBatches(pairs_of([(20, 20)]), max_tokens=8)


def test_a_batch_holds_shifted_targets_and_zeros_elsewhere():
    batch = collate([[7, 8, 9], [5]], [[10], [11, 12]])
    assert batch.source.tolist() == [[7, 8, 9, 3], [5, 3, 0, 0]]
    assert batch.source_lengths.tolist() == [4, 2]
    assert batch.target_in.tolist() == [[2, 10, 0], [2, 11, 12]]
    assert batch.target_out.tolist() == [[10, 3, 0], [11, 12, 3]]
    assert batch.target_lengths.tolist() == [2, 3]
    assert (batch.source_tokens, batch.target_tokens, len(batch)) == (6, 5, 2)
    assert batch.padding_ratio == pytest.approx(3 / 14)
    assert batch.shape == (2, 4, 3)
    for name in ("source", "target_in", "target_out", "source_lengths", "target_lengths"):
        assert getattr(batch, name).dtype == torch.int64
    assert batch.to("cpu").source.tolist() == batch.source.tolist()


def test_a_batch_is_padded_to_the_size_that_is_asked_for():
    batch = collate([[7, 8, 9], [5]], [[10], [11, 12]], (6, 4))
    assert batch.shape == (2, 6, 4)
    assert batch.source.tolist() == [[7, 8, 9, 3, 0, 0], [5, 3, 0, 0, 0, 0]]
    assert batch.target_in.tolist() == [[2, 10, 0, 0], [2, 11, 12, 0]]
    assert batch.target_out.tolist() == [[10, 3, 0, 0], [11, 12, 3, 0]]
    assert (batch.source_lengths.tolist(), batch.target_lengths.tolist()) == ([4, 2], [2, 3])


def test_an_empty_source_is_its_end_alone():
    padded, lengths = pad_sentences([[], [4]])
    assert padded.tolist() == [[EOS, 0], [4, EOS]]
    assert lengths.tolist() == [1, 2]
