"""Attention, coverage and prefixes against Hugging Face's and CTranslate2's, with the same weights.

Neither has diverse beams or required phrases to compare with: Hugging Face 5 took both out of generate().
"""

import random

import pytest
import torch

from benchmarks.peers import huggingface
from fasttfm.convert.ctranslate2 import write
from fasttfm.data.tokenizer import BOS, EOS, PAD
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, score_ids, search_ids
from fasttfm.search.coverage import cross_attention

CONFIG = TransformerConfig(
    vocab_size=60, d_model=64, heads=4, d_ff=128, encoder_layers=2, decoder_layers=3, dropout=0.0, max_length=128
)


@pytest.fixture(scope="module")
def model(ending_model) -> Transformer:
    return ending_model(CONFIG, 6.0)


SOURCES = [[*draw.choices(range(4, 60), k=draw.randint(1, 20)), EOS] for draw in [random.Random(1)] for _ in range(30)]


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_attention_is_hugging_faces(model, layer):
    pytest.importorskip("transformers")
    theirs = huggingface.marian(CONFIG, model.state_dict())
    theirs.set_attn_implementation("eager")
    targets = [source[-2::-1] for source in SOURCES]
    results = cross_attention(model, SOURCES, targets, DecodingConfig(alignment_layer=layer))
    for source, target, weights in zip(SOURCES, targets, results):
        with torch.inference_mode():
            outputs = theirs(
                input_ids=torch.tensor([source]),
                decoder_input_ids=torch.tensor([[BOS, *target]]),
                output_attentions=True,
            )
        torch.testing.assert_close(weights, outputs.cross_attentions[layer - 1][0].mean(dim=0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("beam", [4, 8])
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.3), (0.1, 0.1)])
def test_scores_with_the_coverage_penalty_are_ctranslate2s(model, tmp_path, beam, alpha, beta):
    """Of every hypothesis that both have. Nothing is forbidden: what is, it takes out of the probabilities as well."""
    peer = pytest.importorskip("ctranslate2")
    words = ["<blank>", "<unk>", "<s>", "</s>", *map(str, range(4, 60))]
    write(CONFIG, model.state_dict(), tmp_path, words, words, alignment_layer=2)
    translator = peer.Translator(str(tmp_path), device="cpu", compute_type="float32", intra_threads=1)
    theirs = translator.translate_batch(
        [[words[token] for token in source] for source in SOURCES], beam_size=beam, num_hypotheses=beam,
        length_penalty=alpha, coverage_penalty=beta, max_decoding_length=25, min_decoding_length=0, patience=2,
        return_scores=True, max_batch_size=1,
    )  # fmt: skip
    settings = DecodingConfig(
        beam=beam, nbest=beam, length_penalty="power", alpha=alpha, coverage_penalty=beta, alignment_layer=2,
        max_len_a=0.0, max_len_b=25, allow_unk=True,
    )  # fmt: skip
    both = 0
    for _, ours, result in zip(SOURCES, search_ids(model, SOURCES, settings), theirs):
        outputs = [tuple(words.index(word) for word in hypothesis) for hypothesis in result.hypotheses]
        scores = {tokens: score for tokens, score in zip(outputs, result.scores) if len(tokens) < 25}
        for each in ours:
            if tuple(each.tokens) in scores:
                both += 1
                assert each.score == pytest.approx(scores[tuple(each.tokens)], abs=2e-4)
        assert [each.score for each in ours] == sorted((each.score for each in ours), reverse=True)
    assert both >= 15


@pytest.mark.parametrize("beam", [1, 4, 8])
def test_prefixes_are_gone_on_with_as_ctranslate2_does(model, tmp_path, beam):
    """Greedy search finds the same. With a beam ours may find a better one, and never a worse one."""
    peer = pytest.importorskip("ctranslate2")
    words = ["<blank>", "<unk>", "<s>", "</s>", *map(str, range(4, 60))]
    write(CONFIG, model.state_dict(), tmp_path, words, words)
    translator = peer.Translator(str(tmp_path), device="cpu", compute_type="float32", intra_threads=1)
    draw = random.Random(2)
    prefixes = [draw.choices(range(4, 60), k=1 + position % 3) for position in range(len(SOURCES))]
    theirs = translator.translate_batch(
        [[words[token] for token in source] for source in SOURCES],
        [[words[token] for token in prefix] for prefix in prefixes], beam_size=beam, length_penalty=0.0,
        max_decoding_length=25, min_decoding_length=0, disable_unk=True, patience=2 if beam > 1 else 1,
        suppress_sequences=[[words[PAD]], [words[BOS]]],
    )  # fmt: skip
    settings = DecodingConfig(beam=beam, length_penalty="none", max_len_a=0.0, max_len_b=25)
    results = [each[0] for each in search_ids(model, SOURCES, settings, prefixes=prefixes)]
    outputs = [[words.index(word) for word in result.hypotheses[0]] for result in theirs]
    exact = score_ids(model, SOURCES, outputs)
    equal = compared = 0
    for prefix, ours, output, log_probability in zip(prefixes, results, outputs, exact):
        assert ours.tokens[: len(prefix)] == output[: len(prefix)] == prefix
        equal += ours.tokens == output
        if beam > 1 and len(output) < 25:  # it ended by itself
            compared += 1
            assert ours.log_probability >= log_probability - 1e-4
    assert equal >= (0.97 * len(SOURCES) if beam == 1 else 5)
    assert beam == 1 or compared >= 10
