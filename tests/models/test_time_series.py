"""The time-series model: widths, masks and positions, and the example on torch.nn."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm.errors import ArgumentError
from fasttfm.models import TimeSeriesTransformer

EXAMPLE = Path(__file__).parents[2] / "examples" / "time_series_layers.py"


def small(**changes: Any) -> TimeSeriesTransformer:
    """A model of width 8 without dropout, initialized with seed 0."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"dim_feedforward_encoder": 12, "dim_feedforward_decoder": 10, "dropout": 0.0}
    return TimeSeriesTransformer(8, 2, **arguments | changes)


@pytest.mark.parametrize("triangular", [True, False])
@pytest.mark.parametrize("positions", [None, "paper", "tensor2tensor"])
@pytest.mark.parametrize(("source_width", "target_width", "output"), [(1, 1, 1), (7, 3, 24)])
def test_shapes_and_gradients(
    source_width: int, target_width: int, output: int, positions: str | None, triangular: bool
) -> None:
    model = small(
        num_decoder_layers=2, src_input_size=source_width, tgt_input_size=target_width, tgt_output_size=output,
        positional_encoding=positions, triangular_memory_mask=triangular,
    )  # fmt: skip
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


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("side", ["causal_target_mask", "triangular_memory_mask"])
@pytest.mark.parametrize(("targets", "sources"), [(4, 6), (6, 4), (5, 5)])
def test_a_mask_hides_what_is_later(targets: int, sources: int, side: str, hides: bool) -> None:
    model = small(**{side: hides})
    memory, target = torch.randn(1, sources, 8), torch.randn(1, targets, 1)
    before, of_target = model.decode(target, memory), side == "causal_target_mask"
    for position in range(1, targets if of_target else sources):
        later = torch.tensor(position)
        changed = target.index_fill(1, later, 9.0) if of_target else target
        after = model.decode(changed, memory if of_target else memory.index_fill(1, later, 9.0))
        assert torch.allclose(after[:, :position], before[:, :position], atol=1e-5) == hides
        if position < targets:
            assert not torch.allclose(after[:, position:], before[:, position:], atol=1e-3)


def test_every_matrix_is_initialized_and_layers_differ() -> None:
    model = small(num_encoder_layers=2)
    first, second = model.encoder.layers
    assert not torch.equal(first.linear1.weight, second.linear1.weight)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            rows = parameter.shape[0] // (3 if name.endswith("in_proj_weight") else 1)
            bound = (6 / (rows + parameter.shape[1])) ** 0.5
            assert 0.5 * bound < parameter.abs().max() <= bound, name


@pytest.mark.parametrize("positions", [True, False])
def test_the_example_gives_outputs_and_gradients_as_on_torch_with_changed_imports(positions: bool) -> None:
    source, target = torch.randn(2, 12, 1), torch.randn(2, 6, 1)
    text, outputs = EXAMPLE.read_text(encoding="utf-8"), []
    for library in ("fasttfm.nn", "torch.nn"):
        names: dict[str, Any] = {"__name__": "example"}
        exec(compile(text.replace("from fasttfm.nn import", f"from {library} import"), "example", "exec"), names)
        assert names["TransformerEncoder"].__module__.startswith(library.split(".")[0])
        torch.manual_seed(0)
        model = names["SeriesModel"](d_model=16, dropout=0.0, positional_encoding=positions)
        y = model(source, target)
        outputs.append([y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
