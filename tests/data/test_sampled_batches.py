"""Batches for subword sampling: token budget, reproducibility, the share of each rank, worker processes."""

import gc

import pytest
from waiting import is_alive, wait_for_end

from fasttfm.data.prepared import ParallelTokens
from fasttfm.data.sampled_batches import SampledBatches
from fasttfm.data.sampling import SubwordSampler
from fasttfm.data.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def spoken() -> tuple[Tokenizer, list[str], ParallelTokens]:
    lines = [f"the {colour} house number {i}" for i in range(60) for colour in ("green", "red")]
    tokenizer = train_tokenizer(lines, vocab_size=320)
    ids = tokenizer.encode_lines(lines)
    return tokenizer, lines, ParallelTokens.from_lists(ids, ids)


def sampled(spoken, budget=60, amount=0.2, **more) -> SampledBatches:
    tokenizer, _, pairs = spoken
    return SampledBatches(pairs, budget, seed=5, amount=amount, tokenizers=(tokenizer, tokenizer), **more)


def all_rows(batches: SampledBatches, epoch: int, places) -> list[tuple]:
    order = batches.epoch(epoch)
    return [(order[place].tolist(), batches.batch(order[place], epoch).source.tolist()) for place in places]


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr("fasttfm.data.sampled_batches._WINDOW", 6)
    monkeypatch.setattr("fasttfm.data.sampled_batches._LEAST_WINDOW", 3)


@pytest.mark.parametrize(("amount", "window", "budget"), [(0.1, 128, 60), (0.1, 3, 60), (0.9, 128, 60), (0.9, 4, 30)])
def test_sampling_skips_no_pair_and_most_segmentations_fit(spoken, monkeypatch, amount, window, budget):
    monkeypatch.setattr("fasttfm.data.sampled_batches._WINDOW", window)
    monkeypatch.setattr("fasttfm.data.sampled_batches._LEAST_WINDOW", 1)
    tokenizer, _, pairs = spoken
    batches = sampled(spoken, budget, amount)
    assert batches.skipped == 0
    sampler = SubwordSampler(tokenizer, amount)
    sampled_ids = [sampler.sample(pairs.target(i), 5, 1, i, 1) for i in range(len(pairs))]
    seen, taken = [], 0
    assert len(batches.epoch(1)) == len(batches)
    for indices in batches.epoch(1):
        batch = batches.batch(indices, 1)
        assert len(batch) * max(batch.source.shape[1], batch.target_in.shape[1]) <= budget
        for i, row, length in zip(indices, batch.target_out.tolist(), batch.target_lengths.tolist(), strict=True):
            ids = row[: length - 1]
            assert ids in (sampled_ids[i].tolist(), pairs.target(i).tolist())
            taken += ids == sampled_ids[i].tolist()
            seen.append(int(i))
    assert sorted(seen) == list(range(len(pairs)))
    assert taken > 0.75 * len(pairs)


def test_a_batch_does_not_depend_on_the_batches_before_it(spoken, small_windows):
    """As in a run that resumes from a checkpoint."""
    alone = [all_rows(sampled(spoken), 2, [place])[0] for place in (*range(12), -1)]
    batches = sampled(spoken)
    assert alone == all_rows(batches, 2, [*range(12), len(batches) - 1])


def test_a_rank_samples_only_its_own_batches_and_gets_what_one_process_gets(spoken, small_windows, monkeypatch):
    counts: list[int] = []
    sample = SubwordSampler.sample
    monkeypatch.setattr(SubwordSampler, "sample", lambda *args: (counts.append(1), sample(*args))[1])
    alone = sampled(spoken, together=4)
    count = len(alone) // 4 * 4
    counts.clear()
    whole = all_rows(alone, 0, range(count))
    total = sum(counts)
    for rank in range(2):
        mine = [place for place in range(count) if place % 4 // 2 == rank]
        batches = sampled(spoken, together=4)
        counts.clear()
        assert all_rows(batches, 0, mine) == [whole[place] for place in mine]
        assert 0.3 * total < sum(counts) < 0.7 * total


def test_workers_sample_what_this_process_samples_and_end_with_it(spoken, small_windows):
    here, pooled = (sampled(spoken, together=2, processes=count) for count in (0, 2))
    places = range(len(here))
    for epoch in (0, 1):
        assert all_rows(pooled, epoch, places) == all_rows(here, epoch, places)
    pids = list(pooled._pool.pids)
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    del pooled
    gc.collect()
    wait_for_end(pids)
