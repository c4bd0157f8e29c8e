"""Minimum Bayes risk decoding: picks the sample that agrees most with all samples.

The mode of a model is often too short or odd; what samples have in common seldom is. The utility is chrF, averaged over
all samples as references (Eikema and Aziz 2020; chrF: Popovic 2015).
"""

from collections import Counter
from collections.abc import Sequence

from sacrebleu.metrics import CHRF


def minimum_bayes_risk(texts: Sequence[str]) -> list[tuple[int, float]]:
    """Indices of the distinct texts and their mean chrF (0 to 100) against all other samples, best first.

    A text sampled several times counts as often as a reference, itself excluded once. Ties keep their order. Costs one
    comparison per pair of distinct texts.
    """
    counts = Counter(texts)
    metric = CHRF()
    scored = []
    for index, text in enumerate(texts):
        if text in texts[:index]:
            continue
        others = counts - Counter([text])
        total = sum(times * metric.sentence_score(text, [other]).score for other, times in others.items())
        scored.append((index, total / max(1, others.total())))
    return sorted(scored, key=lambda each: -each[1])
