"""Byte-pair encoding as Sennrich et al. 2016 describe it, learned and applied one merge after the other."""

import itertools
from collections import Counter

END = "</w>"


def merged(parts, pair):
    """Every place where a pair stands becomes one part, from the left."""
    result, at = [], 0
    while at < len(parts):
        if tuple(parts[at : at + 2]) == pair:
            result.append(parts[at] + parts[at + 1])
            at += 2
        else:
            result.append(parts[at])
            at += 1
    return result


def learn(lines, merges):
    """The pairs that are joined, in their order; lines: of tokens with spaces between."""
    words = Counter(word for line in lines for word in line.split())
    split = {word: [*word[:-1], word[-1] + END] for word in words}
    codes = []
    for _ in range(merges):
        counts = Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                counts[pair] += words[word]
        pair, count = max(counts.items(), key=lambda each: (each[1], each[0]), default=(None, 0))
        if count < 2:
            break
        codes.append(pair)
        split = {word: merged(parts, pair) for word, parts in split.items()}
    return codes


def apply(codes, word, end_alone=False):
    """The pieces of a word: every merge in turn."""
    parts = [*word, END] if end_alone else [*word[:-1], word[-1] + END]
    for pair in codes:
        parts = merged(parts, pair)
    text = " ".join(parts).removesuffix(END).rstrip()
    return text.replace(" ", "@@ ").split(" ")


def subword_nmt_file(codes):
    return "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in codes)


def fastbpe_file(codes):
    return "".join(f"{left} {right} {len(codes) - rank}\n" for rank, (left, right) in enumerate(codes))
