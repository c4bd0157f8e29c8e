"""Batch invariance: a sentence gets the same bits in every batch."""

import random

import pytest

from fasttfm.cpu import linear
from fasttfm.search import DecodingConfig, search_ids

from .small_models import model_of
from .table_model import EOS

VOCABULARY = 600


def sources(lengths) -> list[list[int]]:
    draw = random.Random(1)
    return [[*(draw.randrange(4, VOCABULARY) for _ in range(length)), EOS] for length in lengths]


DISTINCT = sources([26] * 12 + [25] * 4 + [*range(3, 27, 3)])  # 26, 27 and 28 tokens are padded to one length
BATCH = DISTINCT + DISTINCT[:16] + DISTINCT
SIZES = {"a small model": (48, 3), "a wide model": (512, 8)}
"""Weights too small to be packed for oneDNN, and large enough that it splits their sums."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beam", [1, 4])
def test_bits_do_not_depend_on_batch_and_order(kind, size, beam):
    model = model_of(kind, VOCABULARY, *SIZES[size], std=4.0, norm_first=beam == 4, final_norm=beam == 4)
    settings = DecodingConfig(beam=beam, nbest=beam, max_len_a=0.0, max_len_b=7)
    alone = [search_ids(model, [source], settings)[0] for source in DISTINCT]
    assert len({tuple(hypotheses[0].tokens) for hypotheses in alone}) > len(DISTINCT) / 3
    alone = alone + alone[:16] + alone
    draw = random.Random(2)
    for count in (2, 3, 5, 9, 17, 33, 64):
        chosen = draw.sample(range(len(BATCH)), count)
        results = search_ids(model, [BATCH[position] for position in chosen], settings, max_tokens=10_000)
        assert results == [alone[position] for position in chosen], count


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("size", SIZES)
def test_bits_do_not_depend_on_the_number_of_threads(kind, size, threads):
    model = model_of(kind, VOCABULARY, *SIZES[size], std=4.0)
    settings = DecodingConfig(beam=4, nbest=4, max_len_a=0.0, max_len_b=4)
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append(search_ids(model, BATCH, settings, max_tokens=10_000))
    assert all(each == results[0] for each in results)


def test_a_search_without_batch_invariance_depends_on_the_batch(monkeypatch):
    """In at least one precision; otherwise the tests above would prove nothing. Which one depends on the processor:
    bfloat16 with AMX, float32 where PyTorch multiplies."""
    for name in ("_packed_dtypes", "_panel_dtypes"):
        monkeypatch.setattr(linear, name, lambda: ())
    settings = DecodingConfig(beam=4, max_len_a=0.0, max_len_b=7, batch_invariant=False)

    def depends_on_the_batch(kind):
        model = model_of(kind, VOCABULARY, *SIZES["a wide model"], std=4.0)
        alone = [search_ids(model, [source], settings)[0] for source in DISTINCT]
        return search_ids(model, DISTINCT, settings, max_tokens=10_000) != alone

    assert any(map(depends_on_the_batch, ("bf16", "fp32")))
