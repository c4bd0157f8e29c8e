"""Searches of other systems with our weights, end-of-sentence and length penalties: what they find, how good it is.

Ours files every hypothesis that ends among the 2K best extensions, as tensor2tensor does; Hugging Face and CTranslate2
file those among the K best alone. So ours may find a better one, and must never find a worse one.
"""

import random

import pytest
import torch

from benchmarks.peers import ctranslate2, huggingface
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, score_ids, search_ids
from fasttfm.search.batches import padded

CONFIG = TransformerConfig(
    vocab_size=60, d_model=64, heads=4, d_ff=128, encoder_layers=2, decoder_layers=2, dropout=0.0, max_length=128
)
LONGEST = 60
COUNT = 100


@pytest.fixture(params=[0.0, 0.6, 1.0])
def alpha(request) -> float:
    return request.param


@pytest.fixture
def model(ending_model, alpha) -> Transformer:
    return ending_model(CONFIG, {0.0: 4.0, 0.6: 3.2, 1.0: 4.0}[alpha])


def sources() -> list[list[int]]:
    draw = random.Random(1)
    return [[*draw.choices(range(4, 60), k=draw.randint(1, 20)), EOS] for _ in range(COUNT)]


def best_of_hugging_face(model: Transformer, beam: int, alpha: float) -> tuple[list[list[int]], list[float]]:
    pytest.importorskip("transformers")
    theirs = huggingface.marian(CONFIG, model.state_dict())
    ids, lengths = padded(sources(), torch.device("cpu"))
    with torch.inference_mode():
        results = theirs.generate(
            input_ids=ids,
            attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
            num_beams=beam,
            do_sample=False,
            max_new_tokens=LONGEST,
            suppress_tokens=[PAD, UNK, BOS],
            return_dict_in_generate=True,
            output_scores=True,
            **({"length_penalty": alpha, "early_stopping": "never"} if beam > 1 else {}),
        )
    outputs = [[token for token in row if token not in (BOS, EOS, PAD)] for row in results.sequences.tolist()]
    return outputs, results.sequences_scores.tolist() if beam > 1 else []


def best_of_ctranslate2(model: Transformer, beam: int, alpha: float) -> list[list[int]]:
    pytest.importorskip("ctranslate2")
    search = ctranslate2.Translate(
        CONFIG, model.state_dict(), beam=beam, length=LONGEST, compute_type="float32", device=torch.device("cpu"),
        threads=1,
    )  # fmt: skip
    search.options |= {"length_penalty": alpha, "min_decoding_length": 1, "num_hypotheses": 1}
    if beam > 1:  # it stops at the first finished hypothesis otherwise
        search.options["patience"] = 2
    return [each[0] for each in search(sources())]


@pytest.mark.sample(1)
@pytest.mark.parametrize("beam", [1, 4, 8])
def test_hugging_face_finds_nothing_better(model, beam, alpha):
    settings = DecodingConfig(
        beam=beam, length_penalty="power", alpha=alpha, max_len_a=0.0, max_len_b=LONGEST, min_len=0
    )
    ours = [each[0] for each in search_ids(model, sources(), settings)]
    outputs, scores = best_of_hugging_face(model, beam, alpha)
    equal = compare(model, ours, outputs, alpha, beam)
    for results, output, score in zip(ours, outputs, scores):
        if results.tokens == output and len(output) < LONGEST:
            assert results.score == pytest.approx(score, abs=1e-4)
    assert equal >= 0.97 * COUNT


@pytest.mark.sample(1)
@pytest.mark.parametrize("beam", [1, 4, 8])
def test_ctranslate2_finds_nothing_better(model, beam, alpha):
    settings = DecodingConfig(
        beam=beam, length_penalty="power", alpha=alpha, max_len_a=0.0, max_len_b=LONGEST, min_len=1
    )
    ours = [each[0] for each in search_ids(model, sources(), settings)]
    equal = compare(model, ours, best_of_ctranslate2(model, beam, alpha), alpha, beam)
    if beam == 1:
        assert equal >= 0.97 * COUNT
    elif alpha < 1.0:  # where length weighs more it often takes an output that is worse by length^alpha
        assert equal >= 0.85 * COUNT


def compare(model, ours, outputs, alpha: float, beam: int) -> int:
    """How many are equal; of those that differ and ended by themselves, none may be better than ours."""
    exact = score_ids(model, sources(), outputs)
    equal = 0
    for results, output, log_probability in zip(ours, outputs, exact):
        equal += results.tokens == output
        if len(output) < LONGEST and beam > 1:
            assert results.score >= log_probability / (len(output) + 1) ** alpha - 1e-4
    lengths = {len(results.tokens) for results in ours}
    assert len(lengths) > 1
    assert min(lengths) < 10
    return equal
