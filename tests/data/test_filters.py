"""Filters: which pairs each rule skips, and the report."""

from pathlib import Path

import numpy as np

from fasttfm.data.corpus import Pair
from fasttfm.data.filters import RULES, Filter, repeated_pairs

LINES = [
    ("A dog runs.", "Ein Hund rennt."),
    ("  ", "Leer."),
    ("word " * 40, "Wort " * 40),
    ("One two three four five six", "Eins"),
    ("Kaputt!", "Kaputt!"),
    ("Hello there", "Собака бежит"),
    ("A dog runs.", "Ein Hund rennt. "),
    ("123 456", "123 456 !"),
]
PAIRS = [Pair(source, target, Path("t.en"), line) for line, (source, target) in enumerate(LINES, start=1)]


def kept(**rules) -> tuple[list[int], Filter]:
    chosen = Filter(20, **rules)
    return [p.line for p in PAIRS if chosen.keeps(p, [5] * len(p.source.split()), [5] * len(p.target.split()))], chosen


def test_rules_are_off_by_default():
    lines, rules = kept()
    assert lines == [1, 4, 5, 6, 7, 8]
    assert rules.counts == {"empty": 1, "too long": 1}


def test_every_rule_skips_its_pair():
    repeated = repeated_pairs(PAIRS, len(PAIRS))
    lines, rules = kept(max_ratio=3.0, drop_identical=True, scripts=("latin", "latin"), repeated=repeated)
    assert lines == [1, 8]  # digits have no script
    assert rules.counts == dict.fromkeys(RULES, 1)
    assert rules.first == {rule: f"t.en:{line}" for line, rule in enumerate(RULES, start=2)}
    said = list(rules.report())
    assert said[0] == "skipped 1 pair with an empty side; first: t.en:2"
    assert [line.rpartition(" ")[2] for line in said] == [f"t.en:{line}" for line in range(2, 8)]


def test_a_pair_at_the_maximum_ratio_is_kept():
    assert Filter(99, max_ratio=3.0).keeps(PAIRS[0], [5] * 2, [5] * 6)
    assert not Filter(99, max_ratio=3.0).keeps(PAIRS[0], [5] * 2, [5] * 7)


def test_japanese_has_three_scripts_and_chinese_one():
    pair = Pair("これは本です。", "这是书", Path("t"), 1)
    assert Filter(99, scripts=("japanese", "chinese")).keeps(pair, [1], [1])
    assert not Filter(99, scripts=("chinese", "chinese")).keeps(pair, [1], [1])
    assert not Filter(99, scripts=("latin", None)).keeps(pair, [1], [1])


def test_all_but_the_first_occurrence_of_a_pair_are_repeated():
    numbers = np.random.default_rng(0).integers(0, 300, 2000).tolist()
    pairs = [Pair(f"s{n}", f"t{n % 7}", Path("t"), 1) for n in numbers]
    assert repeated_pairs(pairs, len(pairs)).tolist() == [n in numbers[:i] for i, n in enumerate(numbers)]
