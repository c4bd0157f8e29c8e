"""The decoding group: peers find the same hypotheses, and the error and the cost are right."""

import dataclasses

import pytest
import torch

from benchmarks.cases import decoding, synthetic
from benchmarks.measure.case import Setting
from benchmarks.peers import ctranslate2, huggingface
from fasttfm.cpu.step_cache import StepCache
from fasttfm.models import Transformer, TransformerConfig

OPTIONS = {"compute_type": "float32", "device": torch.device("cpu"), "threads": 1}
CONFIG = TransformerConfig(
    vocab_size=120, d_model=64, heads=4, d_ff=128, encoder_layers=2, decoder_layers=2, dropout=0.0, max_length=64
)
SOURCES = [*synthetic.sources(5, 9, 120, seed=1), *synthetic.sources(3, 4, 120, seed=2)]
LENGTH = 8


@pytest.fixture(scope="module")
def model() -> Transformer:
    return decoding.random_model(CONFIG, 2)


@pytest.fixture(scope="module")
def exact() -> Transformer:
    """model in float64."""
    return decoding.exact_model(CONFIG, 2, torch.device("cpu"))


def sets(hypotheses):
    return [{*map(tuple, each)} for each in hypotheses]


@pytest.mark.whole
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("peer", ["Hugging Face", "CTranslate2"])
def test_a_peer_with_our_weights_finds_the_same_hypotheses(model, peer, beam):
    weights = model.state_dict()
    if peer == "Hugging Face":
        pytest.importorskip("transformers")
        search = huggingface.Generate(huggingface.marian(CONFIG, weights), beam, LENGTH)
    else:
        pytest.importorskip("ctranslate2")
        search = ctranslate2.Translate(CONFIG, weights, beam=beam, length=LENGTH, **OPTIONS)
    results, ours = search(SOURCES), decoding.Ours(model, beam=beam, length=LENGTH + 1)(SOURCES)
    assert [len(hypotheses) for hypotheses in ours] == [beam] * len(SOURCES)
    assert sets(results) == sets(ours)
    assert len({tuple(hypotheses[0]) for hypotheses in ours}) > len(SOURCES) / 2, "outputs must vary"


def test_ctranslate2_supports_a_pre_norm_model():
    pytest.importorskip("ctranslate2")
    config = dataclasses.replace(CONFIG, norm_first=True, final_norm=True)
    torch.manual_seed(3)
    pre_norm = Transformer(config).eval()
    with torch.no_grad():
        pre_norm.decoder.norm.weight.normal_(std=4.0)
        pre_norm.target_embedding.weight[:4] = 0.0
    search = ctranslate2.Translate(config, pre_norm.state_dict(), beam=2, length=LENGTH, **OPTIONS)
    assert sets(search(SOURCES)) == sets(decoding.Ours(pre_norm, beam=2, length=LENGTH + 1)(SOURCES))


def test_ours_and_hugging_face_take_the_same_number_of_decoder_steps(model, monkeypatch):
    pytest.importorskip("transformers")
    steps = []
    one_step = StepCache.advance
    monkeypatch.setattr(StepCache, "advance", lambda self: (steps.append("ours"), one_step(self))[1])
    (ours,) = {len(tokens) for each in decoding.Ours(model, beam=2, length=LENGTH)(SOURCES) for tokens in each}
    marian = huggingface.marian(CONFIG, model.state_dict())
    marian.model.decoder.register_forward_hook(lambda *_: steps.append("Hugging Face"))
    (theirs,) = {len(tokens) for each in huggingface.Generate(marian, 2, LENGTH)(SOURCES) for tokens in each}
    assert (ours, theirs) == (LENGTH - 1, LENGTH), "ours ends with end-of-sentence, theirs with a word"
    assert steps == ["ours"] * LENGTH + ["Hugging Face"] * LENGTH


def test_hypotheses_are_compared_with_a_search_for_the_same_number_of_words(exact):
    expected = decoding.expected(exact, 2, LENGTH, tuple(map(tuple, SOURCES)))
    assert {len(tokens) for each in expected[LENGTH] for tokens in each} == {LENGTH}
    for words in (LENGTH - 1, LENGTH):
        assert decoding.error(exact, expected[words], (SOURCES, expected)) == 0.0
    mixed = [*expected[LENGTH - 1][:-1], expected[LENGTH][-1]]
    assert decoding.error(exact, mixed, (SOURCES, expected)) == float("inf")


def test_the_error_is_zero_for_equal_tokens_and_grows_with_differences(model, exact):
    right = decoding.Ours(model, beam=2, length=LENGTH)(SOURCES)
    expected = (SOURCES, {LENGTH - 1: right})
    assert decoding.error(exact, right, expected) == 0.0
    swapped = [each[::-1] for each in right]
    assert decoding.error(exact, swapped, expected) == 0.0, "the order of a beam is not compared"
    wrong = [[[max(4, (token + 1) % 120) for token in tokens] for tokens in each] for each in right]
    assert decoding.error(exact, wrong, expected) > 0.05
    one = [*right[:-1], wrong[-1]]
    assert 1e-5 < decoding.error(exact, one, expected) < decoding.error(exact, wrong, expected)
    assert decoding.error(exact, one, expected, sentences=3) == 0.0
    second = [[each[0], wrong_each[1]] for each, wrong_each in zip(right, wrong)]
    assert decoding.error(exact, second, expected, best=1) == 0.0 < decoding.error(exact, second, expected)
    assert decoding.error(exact, right[:-1], expected) == float("inf")
    shorter = [[tokens[:-1] for tokens in each] for each in right]
    assert decoding.error(exact, shorter, expected) == float("inf")


def test_the_cost_of_a_search_by_hand():
    tiny = TransformerConfig(vocab_size=10, d_model=4, heads=1, d_ff=8, encoder_layers=1, decoder_layers=1)
    cost = decoding.search_cost(tiny, batch=2, beam=3, source=5, length=4, size=4)
    encoder, cross, decoder = 4 * 16 + 2 * 32, 2 * 16, 6 * 16 + 2 * 32 + 40
    rows = 2 + 2 * 3 * 3
    attention = 4 * 10 * 5 * 4 + 4 * rows * 4 * (5 + 2)
    assert cost.flops == 2 * (10 * (encoder + cross) + rows * decoder) + attention
    assert cost.bytes == 4 * (encoder + cross + 4 * decoder + 2 * 4 * (4 * 10 + rows * 2))


def test_cases_of_every_level(monkeypatch):
    monkeypatch.setattr(decoding, "multiplies_bfloat16", lambda device: True)

    def listed(level: str, device: str = "cpu"):
        setting = Setting(device=torch.device(device), dtype=torch.float32, level=level)
        return {(case.name, case.dtype, case.shape["batch"], case.shape["beam"]) for case in decoding.cases(setting)}

    assert {("paper-base", "float32", batch, beam) for batch in (1, 32) for beam in (1, 4)} <= listed("quick")
    assert {batch for _, _, batch, _ in listed("full")} >= {1, 8, 32, 128}
    assert {beam for _, _, _, beam in listed("standard")} == {1, 4, 8}
    assert {dtype for _, dtype, _, _ in listed("standard")} == {"float32", "bfloat16"}
    monkeypatch.setattr(decoding, "multiplies_bfloat16", lambda device: False)
    assert {dtype for _, dtype, _, _ in listed("standard")} == {"float32", "int8"}
    assert {dtype for _, dtype, _, _ in listed("standard", "cuda")} == {"float32"}
    pairs = {(batch, beam) for *_, batch, beam in listed("quick", "cuda")}
    assert pairs == {(1, 1), (1, 4), (32, 1), (32, 4), (128, 4)}
    assert {name for name, *_ in listed("quick")} == {"paper-base"}
