"""Means of runs by several seeds, in the report and README."""

from benchmarks.measure.records import load
from benchmarks.report import page, readme, seeds


def runs(end_to_end, *scores, **fields):
    """Records of a speedrun; scores: seed and BLEU of each run, the oldest first."""
    command = "fasttfm train --preset multi30k-fast --threads 2 --seed"
    return [
        end_to_end(
            "multi30k-fast", train_command=f"{command} {seed}", bleu=bleu, minutes_of={"train": 18.0, "score": 1.5},
            machine={"time": f"2026-11-{10 + number}T00:00:00+00:00"}, **fields,
        )
        for number, (seed, bleu) in enumerate(scores)
    ]  # fmt: skip


def test_a_mean_is_of_the_newest_run_of_each_seed(write, end_to_end):
    entries = load(write("a.jsonl", *runs(end_to_end, (1, 9.0), (1, 39.0), ("1 --seed 2", 40.0), (3, 39.5))))
    assert [mean.words() for mean in seeds.means(entries)] == [
        "**39.50 BLEU** in 19.5 minutes from the text, mean of 3 seeds (39.00 to 40.00)"
    ]
    text = page.machine_page("a machine", entries, entries, charted=False)
    assert "\n- `--preset multi30k-fast --threads 2`: **39.50 BLEU** in" in text
    assert "[speedrun](docs/speedrun.md) on two CPU cores: **39.50 BLEU** in" in readme.figures(entries)


def test_two_seeds_and_another_test_set_make_no_mean_together(write, end_to_end):
    two, other = runs(end_to_end, (1, 39.0), (2, 40.0)), runs(end_to_end, (3, 30.0), test="test_2016_flickr")
    entries = load(write("a.jsonl", *two, *other))
    assert seeds.means(entries) == []
    assert "multi30k-fast --threads 2 --seed 3`, scored on test_2016_flickr |" in page.machine_page(
        "a machine", entries, entries, charted=False
    )
