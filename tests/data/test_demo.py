"""The demo corpus is the same on every machine."""

import hashlib
import itertools

from fasttfm.data.demo import demo_corpus, demo_pairs


def test_the_corpus_is_the_same_on_every_machine():
    corpus = demo_corpus()
    text = "\n".join("\t".join(pair) for pairs in corpus.values() for pair in pairs)
    digest = "d5d3292548d0a9c0d600e0d6ba1c44ec66e0d4842f9f47785bab1e3f1add2686"
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert list(itertools.islice(demo_pairs(1), 5)) != list(itertools.islice(demo_pairs(2), 5))
