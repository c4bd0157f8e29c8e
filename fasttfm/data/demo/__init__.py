"""The built-in English-German corpus, made by a grammar."""

from fasttfm.data.demo.corpus import SPLITS, demo_corpus, demo_pairs, write_demo_corpus

__all__ = ["SPLITS", "demo_corpus", "demo_pairs", "write_demo_corpus"]
