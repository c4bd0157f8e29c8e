"""The time-series model: defaults, widths, masks and positions, and the example on torch.nn."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fasttfm.errors import ArgumentError
from fasttfm.models import TimeSeriesTransformer

EXAMPLE = Path(__file__).parents[2] / "examples" / "time_series_layers.py"


def small(**changes: Any) -> TimeSeriesTransformer:
    """A model of width 8 without dropout, initialized with seed 0."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"dim_feedforward_encoder": 12, "dim_feedforward_decoder": 10, "dropout": 0.0}
    return TimeSeriesTransformer(8, 2, **arguments | changes)


def test_the_defaults_are_the_document_s() -> None:
    defaults = {name: value.default for name, value in inspect.signature(TimeSeriesTransformer).parameters.items()}
    assert [defaults[name] for name in ("nhead", "num_encoder_layers", "num_decoder_layers")] == [8, 1, 1]
    assert defaults["dim_feedforward_encoder"] == defaults["dim_feedforward_decoder"] == 2048
    assert defaults["tgt_output_size"] == defaults["src_input_size"] == defaults["tgt_input_size"] == 1
    assert defaults["causal_target_mask"]
    assert defaults["triangular_memory_mask"]
    model = TimeSeriesTransformer(16)
    layer = model.decoder.layers[0]
    assert layer.self_attn.batch_first
    assert layer.activation is nn.functional.relu
    assert not layer.norm_first


@pytest.mark.parametrize("triangular", [True, False])
@pytest.mark.parametrize("positions", [None, "paper", "tensor2tensor"])
@pytest.mark.parametrize(("source_width", "target_width", "output"), [(1, 1, 1), (7, 3, 24)])
def test_shapes_and_gradients(
    source_width: int, target_width: int, output: int, positions: str | None, triangular: bool
) -> None:
    model = small(
        num_decoder_layers=2,
        src_input_size=source_width,
        tgt_input_size=target_width,
        tgt_output_size=output,
        positional_encoding=positions,
        triangular_memory_mask=triangular,
    )
    forecast = model(torch.randn(3, 7, source_width), torch.randn(3, 5, target_width))
    assert forecast.shape == (3, 5, output)
    forecast.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.encoder.layers[0].linear1.out_features == 12
    assert model.decoder.layers[1].linear1.out_features == 10


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("positions", [None, "paper"])
def test_without_embedding_positions_are_added_to_the_inputs(positions: str | None, width: int) -> None:
    model = small(embed=False, positional_encoding=positions)
    source, target = torch.randn(3, 7, width), torch.randn(3, 5, width)
    expected = source.expand(3, 7, 8)
    if positions is not None:
        expected = expected + model.positions.table[:7]
    torch.testing.assert_close(model.encode(source), model.encoder(expected))
    assert model(source, target).shape == (3, 5, 1)


@pytest.mark.parametrize(("embed", "allowed"), [(True, "3"), (False, "1 or 8")])
def test_an_input_of_another_width_is_refused(embed: bool, allowed: str) -> None:
    model = small(embed=embed, src_input_size=3)
    with pytest.raises(ArgumentError, match=rf"source \(2, 7, 4\) must be \(batch, length, {allowed}\)$"):
        model.encode(torch.randn(2, 7, 4))
    with pytest.raises(ArgumentError, match=r"source \(7, 3\) must be"):
        model.encode(torch.randn(7, 3))


def test_without_positions_the_encoder_cannot_tell_an_order() -> None:
    source, turned = torch.randn(2, 6, 1), torch.tensor([3, 1, 5, 0, 4, 2])
    for positions, same in ((None, True), ("paper", False)):
        model = small(positional_encoding=positions)
        memory, other = model.encode(source), model.encode(source[:, turned])
        assert torch.allclose(memory[:, turned], other, atol=1e-5) == same


@pytest.mark.parametrize("causal", [True, False])
def test_the_target_mask_hides_later_targets(causal: bool) -> None:
    model = small(causal_target_mask=causal)
    memory, target = torch.randn(1, 6, 8), torch.randn(1, 4, 1)
    before = model.decode(target, memory)
    for position in range(1, 4):
        changed = target.index_fill(1, torch.tensor(position), 9.0)
        after = model.decode(changed, memory)
        assert torch.allclose(after[:, :position], before[:, :position], atol=1e-5) == causal
        assert not torch.allclose(after[:, position:], before[:, position:], atol=1e-3)


@pytest.mark.parametrize(("targets", "sources"), [(4, 6), (6, 4), (5, 5)])
@pytest.mark.parametrize("triangular", [True, False])
def test_the_memory_mask_hides_later_sources(triangular: bool, targets: int, sources: int) -> None:
    model = small(triangular_memory_mask=triangular)
    memory, target = torch.randn(1, sources, 8), torch.randn(1, targets, 1)
    before = model.decode(target, memory)
    for position in range(1, sources):
        after = model.decode(target, memory.index_fill(1, torch.tensor(position), 9.0))
        assert torch.allclose(after[:, :position], before[:, :position], atol=1e-5) == triangular
        if position < targets:
            assert not torch.allclose(after[:, position:], before[:, position:], atol=1e-3)


def test_masks_are_cached_by_length() -> None:
    model = small()
    first = model.memory_mask(4, 6, torch.device("cpu"))
    assert model.memory_mask(4, 6, torch.device("cpu")) is first
    for shape in ((5, 6), (5, 7)):
        rebuilt = model.memory_mask(*shape, torch.device("cpu"))
        assert rebuilt is not None
        assert torch.equal(rebuilt, torch.ones(shape, dtype=torch.bool).triu(1))
    assert "_memory_mask" not in model.state_dict()
    assert small(triangular_memory_mask=False).memory_mask(4, 6, torch.device("cpu")) is None


def test_every_matrix_is_initialized_and_layers_differ() -> None:
    model = small(num_encoder_layers=2)
    first, second = model.encoder.layers
    assert not torch.equal(first.linear1.weight, second.linear1.weight)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.reset_parameters()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            expected = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            assert bool((parameter == expected).all()), name
        else:
            rows = parameter.shape[0] // (3 if name.endswith("in_proj_weight") else 1)
            bound = (6 / (rows + parameter.shape[1])) ** 0.5
            assert 0.5 * bound < parameter.abs().max() <= bound, name


def with_torch_layers(model: TimeSeriesTransformer) -> TimeSeriesTransformer:
    """Copy a model with torch.nn's encoder and decoder, which get a causal mask tensor."""
    width, heads = model.d_model, model.encoder.layers[0].self_attn.num_heads
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, heads, 12, 0.0, batch_first=True), 1)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(width, heads, 10, 0.0, batch_first=True), 1)
    encoder.load_state_dict(model.encoder.state_dict())
    decoder.load_state_dict(model.decoder.state_dict())

    class Decoder(nn.Module):
        def forward(self, target: torch.Tensor, memory: torch.Tensor, **masks: Any) -> torch.Tensor:
            causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
            return decoder(target, memory, tgt_mask=causal, memory_mask=masks["memory_mask"])

    replaced = copy.deepcopy(model)
    replaced.encoder, replaced.decoder = encoder, Decoder()
    return replaced


def test_it_equals_torch_nn_s_layers_with_the_same_weights() -> None:
    model = small()
    source, target = torch.randn(2, 12, 1), torch.randn(2, 6, 1)
    torch.testing.assert_close(model(source, target), with_torch_layers(model)(source, target), rtol=1e-4, atol=1e-5)


def run_example(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(text, "example", "exec"), names)
    return names


def both_forms() -> tuple[dict[str, Any], dict[str, Any]]:
    """The example on fasttfm.nn and on torch.nn."""
    text = EXAMPLE.read_text(encoding="utf-8")
    changed = text.replace("from fasttfm.nn import", "from torch.nn import")
    assert changed != text
    assert "fasttfm" not in changed.split('"""', 2)[2]
    return run_example(text), run_example(changed)


@pytest.mark.parametrize("positions", [True, False])
def test_the_example_runs_on_torch_with_changed_imports(positions: bool) -> None:
    source, target = torch.randn(2, 12, 1), torch.randn(2, 6, 1)
    outputs = []
    for names in both_forms():
        torch.manual_seed(0)
        model = names["SeriesModel"](d_model=16, dropout=0.0, positional_encoding=positions)
        assert type(model.encoder).__name__ == "TransformerEncoder"
        outputs.append([model(source, target), model(source, target[:, :4]), model(source[:, :5], target)])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    assert outputs[0][0].shape == (2, 6, 1)


def waves(length: int) -> torch.Tensor:
    """(16, length, 1): sines of four periods and four phases."""
    time = torch.arange(length) + 3.0 * torch.arange(4)[:, None, None]
    return (2 * torch.pi * time / torch.tensor([5.0, 7.0, 9.0, 12.0])[None, :, None]).sin().reshape(16, length, 1)


def losses_of(model: nn.Module, updates: int) -> list[float]:
    """Adam on the squared error of the next value, six positions after twelve."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    series = waves(19)
    source, target, wanted = series[:, :12], series[:, 12:18], series[:, 13:]
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(source, target), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_example_learns_as_on_torch() -> None:
    curves = []
    for names in both_forms():
        torch.manual_seed(0)
        model = names["SeriesModel"](32, 4, 2, 64, 48, dropout=0.0, positional_encoding=False)
        curves.append(losses_of(model, 60))
    assert curves[0] == pytest.approx(curves[1], rel=1e-2)
    assert curves[0][-1] < 0.5 * curves[0][0]
