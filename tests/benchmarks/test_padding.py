"""The padding group: both batchings have the same pairs, and only ours has little padding."""

import numpy as np
import pytest
import torch

from benchmarks.cases import padding, synthetic
from benchmarks.measure.case import Setting

CPU = torch.device("cpu")


def half(batch) -> torch.Tensor:
    return torch.tensor(0.5)


def test_both_batchings_have_all_pairs_within_the_budget():
    corpus = synthetic.corpus(200, synthetic.MULTI30K, 50, seed=1)
    widths = np.maximum(corpus.source_lengths, corpus.target_lengths) + 1
    for make in (padding.bucketed, padding.shuffled):
        batches = list(make(corpus, 300))
        assert sorted(np.concatenate(batches)) == list(range(200))
        assert all(len(rows) * widths[rows].max() <= 300 for rows in batches)


def test_random_order_has_the_documents_padding_and_ours_little():
    corpus = synthetic.corpus(10_000, synthetic.WMT, 100, seed=0)

    def share(make) -> float:
        return padding.epoch_of(half, make, CPU, 1_024, 30_000, corpus).padding

    assert 0.5 < share(padding.shuffled) < 0.8
    assert share(padding.bucketed) < 0.08


@pytest.mark.parametrize(
    ("lengths", "mean", "longest"), [(synthetic.WMT, 27, 150), (synthetic.MULTI30K, 14, 40)], ids=["WMT14", "Multi30k"]
)
def test_lengths_have_the_published_distribution(lengths, mean, longest):
    corpus = synthetic.corpus(20_000, lengths, 100, seed=0)
    assert corpus.source_lengths.mean() == pytest.approx(mean, abs=1.0)
    assert np.quantile(corpus.source_lengths, 0.999) < longest
    assert np.corrcoef(corpus.source_lengths, corpus.target_lengths)[0, 1] > 0.8
    repeated = synthetic.corpus(20_000, lengths, 100, seed=0)
    assert np.array_equal(corpus.source(7), repeated.source(7))


def test_an_epoch_stops_after_the_requested_tokens():
    corpus = synthetic.corpus(300, synthetic.MULTI30K, 50, seed=1)
    for tokens in (1, 90, 1_000):
        results = float(padding.epoch_of(half, padding.bucketed, CPU, 100, tokens, corpus).loss) / 0.5
        assert tokens <= results < tokens + corpus.target_lengths.max() + 1
    whole = padding.epoch_of(half, padding.shuffled, CPU, 100, 1 << 60, corpus)
    assert float(whole.loss) == 0.5 * (corpus.target_lengths.sum() + 300)
    assert whole.batches > 1


def test_every_level_has_a_case_and_the_larger_ones_both_distributions():
    def names(level: str, device: str = "cpu") -> list[str]:
        setting = Setting(device=torch.device(device), dtype=torch.float32, level=level)
        return [case.name for case in padding.cases(setting)]

    assert names("quick") == names("smoke") == ["WMT14-like"]
    assert names("full") == names("standard") == names("full", "cuda") == ["WMT14-like", "Multi30k-like"]
