"""The training-step group: all providers take the same step, and the cost is of the tokens without padding."""

import dataclasses

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks.cases import synthetic, training_step
from benchmarks.measure.case import Setting
from benchmarks.peers import huggingface, torch_nn
from benchmarks.peers.torch_nn import Step
from fasttfm.config.training import TrainingConfig
from fasttfm.models import Transformer, TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=60, d_model=32, heads=4, d_ff=64, encoder_layers=2, decoder_layers=2, dropout=0.0, max_length=64
)
TRAINING = TrainingConfig(lr=1e-3, clip_norm=1.0, precision="fp32")
CPU = torch.device("cpu")


def batch(padding: float = 0.3, seed: int = 0):
    return synthetic.batch(6, 10, padding, CONFIG.vocab_size, seed)


@pytest.mark.parametrize("padding", [0.0, 0.4])
@pytest.mark.parametrize("norm_first", [False, True])
def test_three_steps_of_every_provider_give_the_same_losses(norm_first, padding):
    config = dataclasses.replace(CONFIG, norm_first=norm_first, final_norm=norm_first)
    torch.manual_seed(0)
    plain = torch_nn.TorchTransformer(config)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    model = training_step.loaded(Transformer, config, weights, CPU)
    steps = {
        "torch.nn": Step(plain, torch_nn.loss, TRAINING, None),
        "fasttfm": training_step.OurStep(model, TRAINING, CPU, None),
    }
    if not norm_first:
        pytest.importorskip("transformers")
        steps["Hugging Face"] = Step(huggingface.marian(config, weights), huggingface.loss, TRAINING, None)
    batches = [batch(padding, seed) for seed in range(3)]
    losses = {name: [float(step(each)) for each in batches] for name, step in steps.items()}
    expected = losses.pop("torch.nn")
    assert len(set(expected)) == 3
    for name, results in losses.items():
        # the embedding of padding has a gradient in torch.nn's model alone, which never reaches a loss
        assert results == pytest.approx(expected, rel=2e-4), name


def test_the_plain_trainer_has_the_same_dropouts():
    config = dataclasses.replace(CONFIG, dropout=0.25, embedding_dropout=0.5)
    model = torch_nn.TorchTransformer(config)
    layer = model.decoder.layers[0]
    assert model.dropout.p == 0.5
    assert [layer.dropout1.p, layer.dropout2.p, layer.dropout3.p] == [0.25] * 3
    assert layer.dropout.p == layer.self_attn.dropout == layer.multihead_attn.dropout == 0.0  # after ReLU and softmax


def test_a_synthetic_batch_has_the_requested_padding():
    for padding in (0.0, 0.05, 0.2, 0.6):
        made = synthetic.batch(400, 40, padding, 100, seed=3)
        assert made.source.shape == made.target_in.shape == (400, 40)
        assert made.padding_ratio == pytest.approx(padding, abs=0.03)
        assert made.source_tokens == int((made.source != 0).sum())
    assert synthetic.batch(4, 9, 0.6, 100, seed=1).padding_ratio > 0
    one, other = (synthetic.batch(4, 9, 0.6, 100, seed=seed).source for seed in (1, 2))
    assert one.shape == other.shape
    assert not torch.equal(one, other)


def test_head_returns_a_batch_of_the_first_rows(monkeypatch):
    whole = batch(0.4)
    monkeypatch.setattr(training_step, "_CHECKED", 25)
    results = training_step.head(whole)
    assert torch.equal(results.source, whole.source[:2])
    assert results.source_tokens == int((whole.source[:2] != 0).sum())
    assert results.target_tokens == int((whole.target_out[:2] != 0).sum())
    monkeypatch.setattr(training_step, "_CHECKED", 10_000)
    assert training_step.head(whole).target_tokens == whole.target_tokens


def test_the_plain_trainer_builds_no_mask_without_padding():
    assert torch_nn.padding_of(batch(0.0)) is None
    mask = torch_nn.padding_of(batch(0.5))
    assert torch.equal(mask, batch(0.5).source == 0)


def test_cases_of_every_level_on_both_devices():
    def listed(level: str, device: str) -> list[tuple[str, float]]:
        setting = Setting(device=torch.device(device), dtype=torch.float32, level=level)
        return [(case.name, case.shape["padding"]) for case in training_step.cases(setting)]

    assert {name for name, _ in listed("quick", "cuda")} == {"paper-base"}
    assert {name for name, _ in listed("standard", "cuda")} == {"paper-base", "paper-big"}
    assert {padding for _, padding in listed("standard", "cuda")} == {0.0, 0.05, 0.2, 0.6}
    assert {name for name, _ in listed("standard", "cpu")} == {"multi30k"}
    assert {name for name, _ in listed("full", "cpu")} == {"multi30k", "paper-base"}


def test_the_cost_is_of_the_tokens_without_padding():
    setting = Setting(device=CPU, dtype=torch.float32, level="quick")
    half, none = (case.cost for case in training_step.cases(setting) if case.shape["padding"] in (0.6, 0.0))
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

    def step(captured):
        if kind == "fasttfm":
            model = training_step.loaded(Transformer, CONFIG, weights, CPU)
            return training_step.OurStep(model, TRAINING, CPU, None, captured=captured)
        model = training_step.loaded(torch_nn.TorchTransformer, CONFIG, weights, CPU)
        return Step(model, torch_nn.loss, TRAINING, None, captured=captured)

    ordinary, graphed = step(False), training_step.Graphed(step(True), CPU)
    for seed in range(3):
        assert float(graphed(batch(seed=seed))) == pytest.approx(float(ordinary(batch(seed=seed))), rel=1e-6)
    assert graphed.held_bytes() == 0
    segments = [
        {"total_size": 2 << 20, "segment_pool_id": (0, 0)},
        {"total_size": 20 << 20, "segment_pool_id": (0, 7)},
        {"total_size": 4 << 20, "segment_pool_id": (0, 7)},
        {"total_size": 8 << 20, "segment_pool_id": (0, 8)},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    graphed._graphs.pool = (0, 7)
    assert graphed.held_bytes() == 24 << 20
