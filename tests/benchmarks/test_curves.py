"""The benchmark of curves: its orders of batches, its runs, its record and figure."""

import json

import numpy as np
import pytest

from benchmarks import curves
from benchmarks.curves import ConsecutiveShards, RandomLengths
from benchmarks.measure import records
from fasttfm.data.batches import TokenBatches
from fasttfm.data.demo import write_demo_corpus
from fasttfm.data.prepared import ParallelTokens


@pytest.fixture(scope="module")
def pairs():
    lengths = np.random.default_rng(0).integers(1, 30, 400)
    sentences = [[10 + i % 50] * length for i, length in enumerate(lengths)]
    return ParallelTokens.from_lists(sentences, sentences[::-1])


def test_consecutive_shards_come_one_after_the_other_and_whole(pairs):
    batches = ConsecutiveShards(pairs, 128, seed=1, shards=4)
    order = batches.epoch(0)
    assert len(order) == len(batches)
    shards = [sorted(set((indices // 100).tolist())) for indices in order]
    assert all(len(each) == 1 for each in shards)
    assert shards == sorted(shards)
    assert sorted(np.concatenate(order).tolist()) == list(range(400))
    for indices in order[:: len(order) // 7]:
        batch = batches.batch(indices)
        assert [row[: length - 1].tolist() for row, length in zip(batch.source, batch.source_lengths)] == [
            pairs.source(i).tolist() for i in indices
        ]


def test_random_lengths_give_as_many_updates_of_as_many_tokens_with_more_padding(pairs):
    batches, bucketed = RandomLengths(pairs, 128, seed=1), TokenBatches(pairs, 128, seed=1)
    order = batches.epoch(0)
    assert sorted(np.concatenate(order).tolist()) == list(range(400))
    assert len(batches) == len(bucketed)
    assert not np.array_equal(np.concatenate(order), np.concatenate(batches.epoch(1)))
    cells = [sum(each.batch(indices).cells for indices in each.epoch(0)) for each in (batches, bucketed)]
    assert cells[0] > 1.3 * cells[1]


def test_a_comparison_leaves_a_record_a_figure_and_runs_that_are_not_run_again(tmp_path, monkeypatch):
    write_demo_corpus(tmp_path / "text")
    monkeypatch.setattr(
        curves, "_MODEL", {"d_model": 8, "heads": 2, "d_ff": 8, "encoder_layers": 1, "decoder_layers": 1}
    )
    monkeypatch.setattr(curves, "POINTS", 2)
    monkeypatch.setattr(curves, "VALID", 20)
    prepare = ("--vocab-size", "400", "--subset", "1000")
    corpus = curves.end_to_end.Corpus(source="en", target="de", test="test", prepare=prepare, train=())
    monkeypatch.setitem(curves.end_to_end.CORPORA, curves.CORPUS, corpus)
    common = ["--text", str(tmp_path / "text"), "--work", str(tmp_path / "work"), "--updates", "4"]
    common += ["--results", str(tmp_path), "--images", str(tmp_path / "images")]
    assert curves.main(["batching", *common]) == 0
    monkeypatch.setattr(curves, "train", lambda *_: pytest.fail("a finished run was run again"))
    assert curves.main(["batching", *common]) == 0
    first, repeated = (json.loads(line) for line in (tmp_path / "curves.jsonl").read_text().splitlines())
    records.validate(first)
    assert first["runs"] == repeated["runs"]
    assert [point["update"] for points in first["runs"].values() for point in points] == [2, 4, 1]
    alike, mixed = first["runs"].values()
    assert mixed[-1]["cells"] / mixed[-1]["update"] > alike[-1]["cells"] / alike[-1]["update"]
    assert (tmp_path / "images" / "curves-batching.png").stat().st_size > 10_000


def test_every_comparison_is_of_variants_that_differ():
    assert {name for runs in curves.COMPARISONS.values() for name in runs.values()} == set(curves.VARIANTS)
    assert len({str(variant) for variant in curves.VARIANTS.values()}) == len(curves.VARIANTS)
