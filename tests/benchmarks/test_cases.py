"""Cases of training steps, padding and decoding: providers do the same work, and cost and error are right."""

import dataclasses
import importlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks.cases import GROUPS, decoding, padding, synthetic, training_step
from benchmarks.measure.case import LEVELS, Setting
from benchmarks.peers import ctranslate2, huggingface, torch_nn
from benchmarks.peers.torch_nn import Step
from fasttfm.config.training import TrainingConfig
from fasttfm.cpu.step_cache import StepCache
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


def test_the_plain_trainer_has_the_same_dropouts():
    config = dataclasses.replace(CONFIG, dropout=0.25, embedding_dropout=0.5)
    model = torch_nn.TorchTransformer(config)
    layer = model.decoder.layers[0]
    assert model.dropout.p == 0.5
    assert [layer.dropout1.p, layer.dropout2.p, layer.dropout3.p] == [0.25] * 3
    assert layer.dropout.p == layer.self_attn.dropout == layer.multihead_attn.dropout == 0.0  # after ReLU and softmax


def test_the_plain_trainer_builds_no_mask_without_padding():
    assert torch_nn.padding_of(batch(0.0)) is None
    assert torch.equal(torch_nn.padding_of(batch(0.5)), batch(0.5).source == 0)


@pytest.mark.parametrize("padding", [0.0, 0.05, 0.2, 0.6])
def test_a_synthetic_batch_has_the_requested_padding(padding):
    made = synthetic.batch(400, 40, padding, 100, seed=3)
    assert made.source.shape == made.target_in.shape == (400, 40)
    assert made.padding_ratio == pytest.approx(padding, abs=0.03)
    assert made.source_tokens == int((made.source != 0).sum())
    assert synthetic.batch(4, 9, 0.6, 100, seed=1).padding_ratio > 0
    assert not torch.equal(synthetic.batch(400, 40, padding, 100, seed=2).source, made.source)


def test_head_returns_a_batch_of_the_first_rows(monkeypatch):
    whole = batch(0.4)
    monkeypatch.setattr(training_step, "_CHECKED", 25)
    results = training_step.head(whole)
    assert torch.equal(results.source, whole.source[:2])
    assert results.source_tokens == int((whole.source[:2] != 0).sum())
    assert results.target_tokens == int((whole.target_out[:2] != 0).sum())
    monkeypatch.setattr(training_step, "_CHECKED", 10_000)
    assert training_step.head(whole).target_tokens == whole.target_tokens


def test_the_cost_is_of_the_tokens_without_padding():
    half, none = (case.cost for case in training_step.cases(setting_of()) if case.shape["padding"] in (0.6, 0.0))
    assert half.flops / none.flops == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize(
    ("words", "units", "dtype"),
    [
        ([], ["avx2"], "float32"),
        ([], ["avx2", "avx512f", "avx512_bf16"], "bfloat16"),
        (["--dtype", "float32"], ["avx512_bf16"], "float32"),
        (["--dtype", "float16"], ["avx2"], "float16"),
    ],
)
def test_a_step_runs_in_the_given_dtype_or_the_presets(words, units, dtype, monkeypatch):
    monkeypatch.setattr("fasttfm.system.machine.processor_units", lambda: units)
    setting = command_line.setting_of(command_line._parser().parse_args([*words, "--device", "cpu"]))
    assert {case.dtype for case in training_step.cases(setting)} == {dtype}
    assert setting.dtype_name == ("float32" if not words else dtype)  # kernels'


@pytest.mark.parametrize("kind", ["fasttfm", "torch.nn"])
def test_a_graphed_step_is_the_ordinary_one_and_its_memory_is_the_graphs_pool(kind, monkeypatch):
    """With a fake pool: on a CPU the steps run without a graph."""
    weights = torch_nn.TorchTransformer(CONFIG).state_dict()
    ordinary = step_of(kind, CONFIG, weights)
    graphed = training_step.Graphed(step_of(kind, CONFIG, weights, captured=True), CPU)
    for seed in range(3):
        assert float(graphed(batch(seed=seed))) == pytest.approx(float(ordinary(batch(seed=seed))), rel=1e-6)
    assert graphed.held_bytes() == 0
    pools = [(2, (0, 0)), (20, (0, 7)), (4, (0, 7)), (8, (0, 8))]
    segments = [{"total_size": mib << 20, "segment_pool_id": pool} for mib, pool in pools]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    graphed._graphs.pool = (0, 7)
    assert graphed.held_bytes() == 24 << 20


# Padding


def half(batch) -> torch.Tensor:
    return torch.tensor(0.5)


@pytest.mark.parametrize("make", [padding.bucketed, padding.shuffled])
def test_both_batchings_have_all_pairs_within_the_budget(make):
    corpus = synthetic.corpus(200, synthetic.MULTI30K, 50, seed=1)
    widths = np.maximum(corpus.source_lengths, corpus.target_lengths) + 1
    batches = list(make(corpus, 300))
    assert sorted(np.concatenate(batches)) == list(range(200))
    assert all(len(rows) * widths[rows].max() <= 300 for rows in batches)


def test_random_order_has_the_documents_padding_and_ours_little():
    corpus = synthetic.corpus(10_000, synthetic.WMT, 100, seed=0)

    def share(make) -> float:
        return padding.epoch_of(half, make, CPU, 1_024, 30_000, corpus).padding

    assert 0.5 < share(padding.shuffled) < 0.8
    assert share(padding.bucketed) < 0.08


@pytest.mark.parametrize(
    ("lengths", "mean", "longest"), [(synthetic.WMT, 27, 150), (synthetic.MULTI30K, 14, 40)], ids=["WMT14", "Multi30k"]
)
def test_lengths_have_the_published_distribution(lengths, mean, longest):
    corpus = synthetic.corpus(20_000, lengths, 100, seed=0)
    assert corpus.source_lengths.mean() == pytest.approx(mean, abs=1.0)
    assert np.quantile(corpus.source_lengths, 0.999) < longest
    assert np.corrcoef(corpus.source_lengths, corpus.target_lengths)[0, 1] > 0.8
    repeated = synthetic.corpus(20_000, lengths, 100, seed=0)
    assert np.array_equal(corpus.source(7), repeated.source(7))


def test_an_epoch_stops_after_the_requested_tokens():
    corpus = synthetic.corpus(300, synthetic.MULTI30K, 50, seed=1)
    for tokens in (1, 90, 1_000):
        results = float(padding.epoch_of(half, padding.bucketed, CPU, 100, tokens, corpus).loss) / 0.5
        assert tokens <= results < tokens + corpus.target_lengths.max() + 1
    whole = padding.epoch_of(half, padding.shuffled, CPU, 100, 1 << 60, corpus)
    assert float(whole.loss) == 0.5 * (corpus.target_lengths.sum() + 300)
    assert whole.batches > 1


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


def test_ours_and_hugging_face_take_the_same_number_of_decoder_steps(model, monkeypatch):
    pytest.importorskip("transformers")
    steps = []
    one_step = StepCache.advance
    monkeypatch.setattr(StepCache, "advance", lambda self: (steps.append("ours"), one_step(self))[1])
    (ours,) = {len(tokens) for each in decoding.Ours(model, beam=2, length=LENGTH)(SOURCES) for tokens in each}
    marian = huggingface.marian(SEARCHED, model.state_dict())
    marian.model.decoder.register_forward_hook(lambda *_: steps.append("Hugging Face"))
    (theirs,) = {len(tokens) for each in huggingface.Generate(marian, 2, LENGTH)(SOURCES) for tokens in each}
    assert (ours, theirs) == (LENGTH - 1, LENGTH), "ours ends with end-of-sentence, theirs with a word"
    assert steps == ["ours"] * LENGTH + ["Hugging Face"] * LENGTH


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


@pytest.mark.parametrize(
    ("device", "multiplies", "dtypes"),
    [("cpu", True, {"float32", "bfloat16"}), ("cpu", False, {"float32", "int8"}), ("cuda", False, {"float32"})],
)
def test_a_cpu_also_searches_in_the_lower_precision_that_it_multiplies(device, multiplies, dtypes, monkeypatch):
    monkeypatch.setattr(decoding, "multiplies_bfloat16", lambda device: multiplies)
    assert {case.dtype for case in decoding.cases(setting_of(device, "standard"))} == dtypes
