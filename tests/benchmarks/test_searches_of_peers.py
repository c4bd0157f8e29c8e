"""Searches of peers with our weights: hypotheses, scores, coverage and prefixes.

Ours keeps hypotheses that end among the 2K best extensions, as tensor2tensor does; Hugging Face and CTranslate2 only
those among the K best. So ours may find a better one, and must never find a worse one. Neither has diverse beams or
required phrases: Hugging Face 5 removed both from generate().
"""

import random

import pytest
import torch

from benchmarks.peers import huggingface
from fasttfm.convert.ctranslate2 import write
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, score_ids, search_ids
from fasttfm.search.batches import padded

CONFIG = TransformerConfig(
    vocab_size=60, d_model=64, heads=4, d_ff=128, encoder_layers=2, decoder_layers=2, dropout=0.0, max_length=128
)
DRAW = random.Random(1)
SOURCES = [[*DRAW.choices(range(4, 60), k=DRAW.randint(1, 20)), EOS] for _ in range(100)]
FEW = SOURCES[:30]
LONGEST, SHORT = 60, 25
WORDS = ["<blank>", "<unk>", "<s>", "</s>", *map(str, range(4, 60))]
ALLOWED = {"disable_unk": True, "suppress_sequences": [[WORDS[PAD]], [WORDS[BOS]]]}
"""Default restrictions of our search."""
LIMITS = {"max_len_a": 0.0, "max_len_b": SHORT}


@pytest.fixture
def ctranslate2(tmp_path):
    """ctranslate2(model, sources, ...): (hypotheses as ids, scores) for each source."""
    peer = pytest.importorskip("ctranslate2")

    def search(model, sources, *, prefixes=None, alignment_layer=None, **options):
        layer = {} if alignment_layer is None else {"alignment_layer": alignment_layer}
        write(CONFIG, model.state_dict(), tmp_path, WORDS, WORDS, **layer)
        translator = peer.Translator(str(tmp_path), device="cpu", compute_type="float32", intra_threads=1)
        sides = [sources, prefixes] if prefixes else [sources]
        words = ([[WORDS[token] for token in tokens] for tokens in side] for side in sides)
        options = {"min_decoding_length": 0, "patience": 2 if options["beam_size"] > 1 else 1, **options}
        return [
            ([[WORDS.index(word) for word in hypothesis] for hypothesis in result.hypotheses], result.scores)
            for result in translator.translate_batch(*words, **options)
        ]  # without patience it stops at the first end

    return search


def hugging_face(model, beam, alpha):
    """(best hypothesis, its score) of Hugging Face for each source; no scores with a beam of 1."""
    pytest.importorskip("transformers")
    ids, lengths = padded(SOURCES, torch.device("cpu"))
    with torch.inference_mode():
        results = huggingface.marian(CONFIG, model.state_dict()).generate(
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("beam", [1, 4, 8])
@pytest.mark.parametrize(("alpha", "mean"), [(0.0, 4.0), (0.6, 3.2), (1.0, 4.0)])
@pytest.mark.parametrize("peer", ["Hugging Face", "CTranslate2"])
def test_a_peer_finds_nothing_better(peer, beam, alpha, mean, ending_model, request):
    model, scores = ending_model(CONFIG, mean), []
    if peer == "Hugging Face":
        outputs, scores = hugging_face(model, beam, alpha)
    else:
        lengths = {"min_decoding_length": 1, "max_decoding_length": LONGEST}
        search = request.getfixturevalue("ctranslate2")
        found = search(model, SOURCES, length_penalty=alpha, beam_size=beam, **lengths, **ALLOWED)
        outputs = [hypotheses[0] for hypotheses, _ in found]
    limits = {"max_len_a": 0.0, "max_len_b": LONGEST, "min_len": int(peer == "CTranslate2"), "early_stopping": False}
    settings = DecodingConfig(beam=beam, length_penalty="power", alpha=alpha, **limits)
    ours = [hypotheses[0] for hypotheses in search_ids(model, SOURCES, settings)]
    for each, output, log_probability in zip(ours, outputs, score_ids(model, SOURCES, outputs), strict=True):
        if len(output) < LONGEST and beam > 1:
            assert each.score >= log_probability / (len(output) + 1) ** alpha - 1e-4
    for each, output, score in zip(ours, outputs, scores):
        if each.tokens == output and len(output) < LONGEST:
            assert each.score == pytest.approx(score, abs=1e-4)
    lengths = {len(each.tokens) for each in ours}
    assert len(lengths) > 1
    assert min(lengths) < 10
    equal = sum(each.tokens == output for each, output in zip(ours, outputs))
    if peer == "Hugging Face" or beam == 1:
        assert equal >= 0.97 * len(SOURCES)
    elif alpha < 1.0:  # with a larger alpha CTranslate2 often finds worse outputs
        assert equal >= 0.85 * len(SOURCES)


@pytest.fixture(scope="module")
def longer(ending_model) -> Transformer:
    return ending_model(CONFIG, 6.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("beam", [4, 8])
@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 0.1), (0.0, 0.3)])
def test_scores_with_the_coverage_penalty_equal_ctranslate2s(longer, ctranslate2, beam, alpha, beta):
    """For hypotheses that both find, without restrictions, which CTranslate2 applies before the softmax."""
    theirs = ctranslate2(
        longer, FEW, alignment_layer=2, beam_size=beam, num_hypotheses=beam, length_penalty=alpha,
        coverage_penalty=beta, max_decoding_length=SHORT, return_scores=True, max_batch_size=1,
    )  # fmt: skip
    penalties = {"length_penalty": "power", "alpha": alpha, "coverage_penalty": beta, "alignment_layer": 2}
    settings = DecodingConfig(beam=beam, nbest=beam, allow_unk=True, **penalties, **LIMITS)
    both = 0
    for ours, (outputs, found) in zip(search_ids(longer, FEW, settings), theirs, strict=True):
        scores = {tuple(tokens): score for tokens, score in zip(outputs, found, strict=True) if len(tokens) < SHORT}
        for each in ours:
            if tuple(each.tokens) in scores:
                both += 1
                assert each.score == pytest.approx(scores[tuple(each.tokens)], abs=2e-4)
        assert [each.score for each in ours] == sorted((each.score for each in ours), reverse=True)
    assert both >= 15


@pytest.mark.sample(2)
@pytest.mark.parametrize("beam", [1, 4, 8])
def test_prefixes_are_continued_as_by_ctranslate2(longer, ctranslate2, beam):
    """Greedy search finds the same; with a beam ours may be better, but never worse."""
    draw = random.Random(2)
    prefixes = [draw.choices(range(4, 60), k=1 + position % 3) for position in range(len(FEW))]
    options = {"beam_size": beam, "length_penalty": 0.0, "max_decoding_length": SHORT, **ALLOWED}
    outputs = [hypotheses[0] for hypotheses, _ in ctranslate2(longer, FEW, prefixes=prefixes, **options)]
    settings = DecodingConfig(beam=beam, length_penalty="none", **LIMITS)
    results = [each[0] for each in search_ids(longer, FEW, settings, prefixes=prefixes)]
    equal = compared = 0
    for prefix, ours, output, log_probability in zip(
        prefixes, results, outputs, score_ids(longer, FEW, outputs), strict=True
    ):
        assert ours.tokens[: len(prefix)] == output[: len(prefix)] == prefix
        equal += ours.tokens == output
        if beam > 1 and len(output) < SHORT:  # it ended by itself
            compared += 1
            assert ours.log_probability >= log_probability - 1e-4
    assert equal >= (0.97 * len(FEW) if beam == 1 else 5)
    assert beam == 1 or compared >= 10
