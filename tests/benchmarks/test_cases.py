"""Cases of training steps, padding and decoding: providers do the same work, and cost and error are right."""

import dataclasses
import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.cases import GROUPS, decoding, padding, synthetic, training_step
from benchmarks.measure.case import LEVELS, Setting
from benchmarks.peers import ctranslate2, huggingface, torch_nn
from benchmarks.peers.torch_nn import Step
from fasttfm.config.training import TrainingConfig
from fasttfm.models import Transformer, TransformerConfig

CPU = torch.device("cpu")


def setting_of(device: str = "cpu", level: str = "quick") -> Setting:
    return Setting(device=torch.device(device), dtype=torch.float32, level=level)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("group", GROUPS)
def test_every_level_of_a_group_has_cases_and_the_larger_ones_no_fewer(group, device, monkeypatch):
    monkeypatch.setattr(Setting, "small_memory", False)  # asks a GPU
    counts = []
    for level in LEVELS:
        titles = [case.title for case in importlib.import_module(GROUPS[group]).cases(setting_of(device, level))]
        assert len(set(titles)) == len(titles)
        counts.append(len(titles))
    assert counts[0] > 0
    assert counts == sorted(counts)


# Training steps

CONFIG = TransformerConfig(
    vocab_size=60, d_model=32, heads=4, d_ff=64, encoder_layers=2, decoder_layers=2, dropout=0.0, max_length=64
)
TRAINING = TrainingConfig(lr=1e-3, clip_norm=1.0, precision="fp32")


def batch(padding: float = 0.3, seed: int = 0):
    return synthetic.batch(6, 10, padding, CONFIG.vocab_size, seed)


def step_of(kind, config, weights, **options):
    """A training step of a provider that begins with these weights."""
    if kind == "fasttfm":
        model = training_step.loaded(Transformer, config, weights, CPU)
        return training_step.OurStep(model, TRAINING, CPU, None, **options)
    if kind == "Hugging Face":
        return Step(huggingface.marian(config, weights), huggingface.loss, TRAINING, None)
    model = training_step.loaded(torch_nn.TorchTransformer, config, weights, CPU)
    return Step(model, torch_nn.loss, TRAINING, None, **options)


@pytest.mark.parametrize("padding", [0.0, 0.4])
@pytest.mark.parametrize(("kind", "norm_first"), [("fasttfm", False), ("fasttfm", True), ("Hugging Face", False)])
def test_three_steps_of_every_provider_give_the_losses_of_torch_nn(kind, norm_first, padding):
    if kind == "Hugging Face":
        pytest.importorskip("transformers")
    config = dataclasses.replace(CONFIG, norm_first=norm_first, final_norm=norm_first)
    weights = torch_nn.TorchTransformer(config).state_dict()
    batches = [batch(padding, seed) for seed in range(3)]
    step = step_of("torch.nn", config, weights)
    expected = [float(step(each)) for each in batches]
    assert len(set(expected)) == 3
    step = step_of(kind, config, weights)
    # the embedding of padding has a gradient in torch.nn's model alone, which never reaches a loss
    assert [float(step(each)) for each in batches] == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("padding", [0.0, 0.05, 0.2, 0.6])
def test_a_synthetic_batch_has_the_requested_padding(padding):
    made = synthetic.batch(400, 40, padding, 100, seed=3)
    assert made.source.shape == made.target_in.shape == (400, 40)
    assert made.padding_ratio == pytest.approx(padding, abs=0.03)
    assert made.source_tokens == int((made.source != 0).sum())
    assert synthetic.batch(4, 9, 0.6, 100, seed=1).padding_ratio > 0
    assert not torch.equal(synthetic.batch(400, 40, padding, 100, seed=2).source, made.source)


def test_the_cost_is_of_the_tokens_without_padding():
    half, none = (case.cost for case in training_step.cases(setting_of()) if case.shape["padding"] in (0.6, 0.0))
    assert half.flops / none.flops == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize("kind", ["fasttfm", "torch.nn"])
def test_a_graphed_step_is_the_ordinary_one(kind):
    """On a CPU the steps run without a graph."""
    weights = torch_nn.TorchTransformer(CONFIG).state_dict()
    ordinary = step_of(kind, CONFIG, weights)
    graphed = training_step.Graphed(step_of(kind, CONFIG, weights, captured=True), CPU)
    for seed in range(3):
        assert float(graphed(batch(seed=seed))) == pytest.approx(float(ordinary(batch(seed=seed))), rel=1e-6)


# Padding


def test_random_order_has_the_documents_padding_and_ours_little():
    corpus = synthetic.corpus(10_000, synthetic.WMT, 100, seed=0)

    def share(make) -> float:
        return padding.epoch_of(lambda batch: torch.tensor(0.5), make, CPU, 1_024, 30_000, corpus).padding

    assert 0.5 < share(padding.shuffled) < 0.8
    assert share(padding.bucketed) < 0.08


# Decoding

SEARCHED = TransformerConfig(
    vocab_size=120, d_model=64, heads=4, d_ff=128, encoder_layers=2, decoder_layers=2, dropout=0.0, max_length=64
)
PRE_NORM = dataclasses.replace(SEARCHED, norm_first=True, final_norm=True)
SOURCES = [*synthetic.sources(5, 9, 120, seed=1), *synthetic.sources(3, 4, 120, seed=2)]
LENGTH = 8


@pytest.fixture(scope="module")
def model() -> Transformer:
    return decoding.random_model(SEARCHED, 2)


@pytest.fixture(scope="module")
def exact() -> Transformer:
    """model in float64."""
    return decoding.exact_model(SEARCHED, 2, CPU)


def sets(hypotheses):
    return [{*map(tuple, each)} for each in hypotheses]


@pytest.mark.parametrize(
    ("peer", "config", "beam"),
    [
        *(pytest.param("transformers", SEARCHED, beam, marks=pytest.mark.whole) for beam in (1, 4)),
        *(pytest.param("ctranslate2", SEARCHED, beam, marks=pytest.mark.whole) for beam in (1, 4)),
        ("ctranslate2", PRE_NORM, 2),
    ],
)
def test_a_peer_with_our_weights_finds_the_same_hypotheses(peer, config, beam, model, monkeypatch):
    """The gate's case in this process: another one takes seconds to start."""
    pytest.importorskip(peer)
    if config is PRE_NORM:
        monkeypatch.setattr(ctranslate2, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
        torch.manual_seed(3)
        model = Transformer(config).eval()
        with torch.no_grad():
            model.decoder.norm.weight.normal_(std=4.0)
            model.target_embedding.weight[:4] = 0.0
    weights = model.state_dict()
    if peer == "transformers":
        search = huggingface.Generate(huggingface.marian(config, weights), beam, LENGTH)
    else:
        options = {"compute_type": "float32", "device": CPU, "threads": 1}
        search = ctranslate2.Translate(config, weights, beam=beam, length=LENGTH, **options)
    results, ours = search(SOURCES), decoding.Ours(model, beam=beam, length=LENGTH + 1)(SOURCES)
    assert [len(hypotheses) for hypotheses in ours] == [beam] * len(SOURCES)
    assert sets(results) == sets(ours)
    assert len({tuple(hypotheses[0]) for hypotheses in ours}) > len(SOURCES) / 2, "outputs must vary"


def test_the_error_is_zero_for_hypotheses_of_the_same_number_of_words_and_grows_with_differences(exact):
    by_length = decoding.expected(exact, 2, LENGTH, tuple(map(tuple, SOURCES)))
    right, longer = by_length[LENGTH - 1], by_length[LENGTH]
    assert {len(tokens) for each in longer for tokens in each} == {LENGTH}

    def error(found, **compared):
        return decoding.error(exact, found, (SOURCES, by_length), **compared)

    assert error(right) == error(longer) == 0.0
    assert error([each[::-1] for each in right]) == 0.0, "the order of a beam is not compared"
    wrong = [[[max(4, (token + 1) % 120) for token in tokens] for tokens in each] for each in right]
    one = [*right[:-1], wrong[-1]]
    assert 1e-5 < error(one) < error(wrong)
    assert error(wrong) > 0.05
    assert error(one, sentences=3) == 0.0
    second = [[each[0], wrong_each[1]] for each, wrong_each in zip(right, wrong)]
    assert error(second, best=1) == 0.0 < error(second)
    shorter = [[tokens[:-1] for tokens in each] for each in right]
    assert error(right[:-1]) == error(shorter) == error([*right[:-1], longer[-1]]) == float("inf")


def test_the_cost_of_a_search_by_hand():
    tiny = TransformerConfig(vocab_size=10, d_model=4, heads=1, d_ff=8, encoder_layers=1, decoder_layers=1)
    cost = decoding.search_cost(tiny, batch=2, beam=3, source=5, length=4, size=4)
    encoder, cross, decoder = 4 * 16 + 2 * 32, 2 * 16, 6 * 16 + 2 * 32 + 40
    rows = 2 + 2 * 3 * 3
    attention = 4 * 10 * 5 * 4 + 4 * rows * 4 * (5 + 2)
    assert cost.flops == 2 * (10 * (encoder + cross) + rows * decoder) + attention
    assert cost.bytes == 4 * (encoder + cross + 4 * decoder + 2 * 4 * (4 * 10 + rows * 2))
