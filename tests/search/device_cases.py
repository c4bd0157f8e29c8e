"""Random searches, for comparing the device engine with the host's."""

import random
from typing import Any

import pytest
import torch

from fasttfm.models import Transformer
from fasttfm.search import DecodingConfig
from fasttfm.search.ensemble import Ensemble

from .small_models import model_of
from .table_model import EOS

KINDS = ("beams", "sampling", "groups", "no repetition", "banned", "selected", "ensemble")
VOCABULARY = 60


def a_case(kind: str, seed: int) -> tuple[Any, list[list[int]], DecodingConfig, dict]:
    """A random model, sources, config and arguments of search_ids(): more sentences than slots, prefixes, all length
    penalties, limits, early stopping."""
    draw = random.Random(f"{kind} {seed}")
    model = Ensemble([transformer(draw), transformer(draw)]) if kind == "ensemble" else transformer(draw)
    config, sources = DecodingConfig(**options(draw, kind)), sources_of(draw, draw.randint(1, 9))
    given: dict = {"prefixes": [draw.choices(range(4, VOCABULARY), k=draw.choice([0, 0, 1, 3])) for _ in sources]}
    if kind == "banned":
        given["banned"] = [draw.choices(range(4, VOCABULARY), k=draw.randint(1, 3)) for _ in range(12)]
    if kind == "selected":
        given["allowed"] = [sorted(draw.sample(range(4, VOCABULARY), 25)) for _ in sources]
    return model, sources, config, given


def sources_of(draw: random.Random, count: int) -> list[list[int]]:
    return [[*draw.choices(range(4, VOCABULARY), k=draw.randint(0, 12)), EOS] for _ in range(count)]


def drawn(seed: int, count: int) -> tuple[Transformer, list[list[int]]]:
    """A random model and `count` random sources."""
    draw = random.Random(seed)
    return transformer(draw), sources_of(draw, count)


def transformer(draw: random.Random) -> Transformer:
    fields = {
        "norm_first": draw.random() < 0.5,
        "activation": draw.choice(["relu", "gelu", "silu"]),
        "share_embeddings": draw.choice(["all", "none"]),
        "positional_encoding": draw.choice(["paper", "learned"]),
        "max_length": draw.choice([24, 64]),
        "output_bias": True,
    }
    model = model_of("fp32", VOCABULARY, 32, encoder_layers=1, dropout=0.0, **fields)
    with torch.no_grad():
        model.output.bias.normal_(std=0.5)
        model.output.bias[EOS] = draw.choice([-1.0, 0.5, 1.5, 2.5])
    return model


def options(draw: random.Random, kind: str) -> dict:
    beam = draw.randint(1, 5)
    shared = {
        "length_penalty": draw.choice(["wu", "power", "avg", "none"]),
        "alpha": draw.choice([0.0, 0.6, 1.7, 6.0]),
        "max_len_a": draw.choice([0.0, 0.5, 1.0]),
        "max_len_b": draw.choice([0, 1, 3, 8, 15]),
        "min_len": draw.choice([0, 0, 1, 4]),
        "batch_tokens": draw.choice([32, 128, 1024]),
        "early_stopping": draw.random() < 0.5,
    }
    if kind == "sampling":
        own = {
            "nbest": draw.randint(1, 4),
            "sampling_topk": draw.choice([0, 3]),
            "temperature": draw.choice([1.0, 0.7]),
        }
        return {**shared, "sampling": True, "sampling_topp": draw.choice([1.0, 0.9]), **own}
    if kind == "groups":
        groups = draw.choice([2, 3])
        beam = groups * draw.randint(1, 2)
        shared |= {"diverse_beam_groups": groups, "diverse_beam_strength": draw.choice([0.0, 0.5, 2.0])}
    if kind == "no repetition":
        shared["no_repeat_ngram"] = draw.choice([1, 2, 3])
    return {**shared, "beam": beam, "nbest": draw.randint(1, beam)}


def assert_same(ours, theirs):
    """Assert equal tokens in equal order, and scores up to the rounding of products with other row counts."""
    assert [[each.tokens for each in some] for some in ours] == [[each.tokens for each in some] for some in theirs]
    for name in ("score", "log_probability"):
        pairs = [[getattr(each, name) for some in side for each in some] for side in (ours, theirs)]
        assert pairs[0] == pytest.approx(pairs[1], rel=1e-5, abs=1e-5)
