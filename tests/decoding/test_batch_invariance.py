"""A sentence's translation and its log-probabilities are the same to the last bit, whatever its batch holds."""

import random

import pytest
import torch

from fasttfm.cpu import linear
from fasttfm.decoding import DecodingConfig, search_ids
from fasttfm.decoding.batches import multiply_in_int8
from fasttfm.models import Transformer, TransformerConfig

EOS = 3
VOCABULARY = 600


def model_of(dtype: torch.dtype, *, d_model: int, heads: int, norm_first: bool) -> Transformer:
    torch.manual_seed(5)
    config = TransformerConfig(
        vocab_size=VOCABULARY, d_model=d_model, heads=heads, d_ff=4 * d_model, encoder_layers=1, decoder_layers=2,
        norm_first=norm_first, final_norm=norm_first,
    )  # fmt: skip
    model = Transformer(config)
    with torch.no_grad():
        norm = model.decoder.norm if norm_first else model.decoder.layers[-1].norm3
        norm.weight.normal_(std=4.0)
    if dtype == torch.int8:
        multiply_in_int8(model)
        return model
    return model.to(dtype)


def sources(lengths) -> list[list[int]]:
    draw = random.Random(1)
    return [[*(draw.randrange(4, VOCABULARY) for _ in range(length)), EOS] for length in lengths]


DISTINCT = sources([26] * 12 + [25] * 4 + [*range(3, 27, 3)])  # 26, 27 and 28 tokens are padded to one length
BATCH = DISTINCT + DISTINCT[:16] + DISTINCT
SIZES = {"a small model": (48, 3), "a wide model": (512, 8)}
"""Weights too small to be laid out for oneDNN, and so large that it splits their sums."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beam", [1, 4])
def test_bits_are_the_same_in_every_batch_and_order(dtype, size, beam):
    d_model, heads = SIZES[size]
    model = model_of(dtype, d_model=d_model, heads=heads, norm_first=beam == 4)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("size", SIZES)
def test_bits_are_the_same_with_any_number_of_threads(dtype, size, threads):
    d_model, heads = SIZES[size]
    model = model_of(dtype, d_model=d_model, heads=heads, norm_first=False)
    settings = DecodingConfig(beam=4, nbest=4, max_len_a=0.0, max_len_b=4)
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append(search_ids(model, BATCH, settings, max_tokens=10_000))
    assert all(each == results[0] for each in results)


def test_the_settings_can_be_seen_to_matter(monkeypatch):
    """A search that need not be invariant is not, in one precision at least: otherwise the tests above would prove
    nothing. In which one depends on the processor: bfloat16 with AMX, float32 without, where PyTorch multiplies."""
    monkeypatch.setattr(linear, "_packed_dtypes", lambda: ())
    settings = DecodingConfig(beam=4, max_len_a=0.0, max_len_b=7, batch_invariant=False)

    def depends_on_the_batch(dtype):
        model = model_of(dtype, d_model=512, heads=8, norm_first=False)
        alone = [search_ids(model, [source], settings)[0] for source in DISTINCT]
        return search_ids(model, DISTINCT, settings, max_tokens=10_000) != alone

    assert any(map(depends_on_the_batch, (torch.bfloat16, torch.float32)))
