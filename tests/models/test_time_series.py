"""The time-series model: shapes, switches, masks, and the document's own form on torch.nn and on fasttfm.nn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fasttfm.models import TimeSeriesTransformer

EXAMPLE = Path(__file__).parents[2] / "examples" / "time_series_layers.py"


@pytest.mark.parametrize("triangular", [True, False])
@pytest.mark.parametrize("positions", [None, "paper", "tensor2tensor"])
def test_shapes_and_gradients(positions: str | None, triangular: bool) -> None:
    model = TimeSeriesTransformer(8, 2, 1, 2, 12, 10, 0.1, positions, triangular)
    output = model(torch.randn(3, 7, 1), torch.randn(3, 5, 1))
    assert output.shape == (3, 5, 1)
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.encoder.layers[0].linear1.out_features == 12
    assert model.decoder.layers[1].linear1.out_features == 10


def test_a_target_position_sees_no_later_target_and_no_later_source() -> None:
    model = TimeSeriesTransformer(8, 2, 1, 1).eval()
    memory, target = torch.randn(1, 6, 8), torch.randn(1, 4, 1)
    before = model.decode(target, memory)
    target[:, 2:], memory[:, 2:] = 9.0, 9.0
    after = model.decode(target, memory)
    torch.testing.assert_close(after[:, :2], before[:, :2])
    assert not torch.allclose(after[:, 2:], before[:, 2:])


def test_without_the_triangle_all_of_the_source_is_seen() -> None:
    model = TimeSeriesTransformer(8, 2, 1, 1, triangular_memory_mask=False).eval()
    memory, target = torch.randn(1, 6, 8), torch.randn(1, 4, 1)
    before = model.decode(target, memory)
    memory[:, 5] = 9.0
    assert not torch.allclose(model.decode(target, memory)[:, 0], before[:, 0])


def test_masks_are_kept_and_rebuilt_when_a_length_changes() -> None:
    model = TimeSeriesTransformer(8, 2, 1, 1)
    first = model.memory_mask(4, 6, torch.device("cpu"))
    assert model.memory_mask(4, 6, torch.device("cpu")) is first
    assert tuple(model.memory_mask(5, 6, torch.device("cpu")).shape) == (5, 6)
    assert "_memory_mask" not in model.state_dict()


def test_the_document_s_form_needs_its_imports_changed_and_nothing_else() -> None:
    ours: dict[str, Any] = {"__name__": "ours"}
    theirs: dict[str, Any] = {"__name__": "theirs"}
    text = EXAMPLE.read_text(encoding="utf-8")
    changed = text.replace("from fasttfm.nn import", "from torch.nn import")
    assert changed != text
    exec(compile(text, "ours", "exec"), ours)
    exec(compile(changed, "theirs", "exec"), theirs)
    torch.manual_seed(0)
    a = theirs["SeriesModel"]()
    torch.manual_seed(0)
    b = ours["SeriesModel"]()
    assert type(a.encoder) is nn.TransformerEncoder
    source, target = torch.randn(2, 12, 1), torch.randn(2, 6, 1)
    torch.testing.assert_close(b(source, target), a(source, target), rtol=1e-4, atol=1e-5)


def waves(length: int) -> torch.Tensor:
    """(16, length, 1): sines of four periods and four phases."""
    at = torch.arange(length) + 3.0 * torch.arange(4)[:, None, None]
    return (2 * torch.pi * at / torch.tensor([5.0, 7.0, 9.0, 12.0])[None, :, None]).sin().reshape(16, length, 1)


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


@pytest.mark.parametrize("triangular", [True, False])
def test_it_learns_with_the_triangular_memory_mask_and_without(triangular: bool) -> None:
    torch.manual_seed(0)
    losses = losses_of(TimeSeriesTransformer(16, 2, 1, 1, 32, 32, 0.0, triangular_memory_mask=triangular), 80)
    assert losses[-1] < 0.3 * losses[0]


def test_the_document_s_form_learns_as_it_does_on_torch() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    curves = []
    for code in (text, text.replace("from fasttfm.nn import", "from torch.nn import")):
        room: dict[str, Any] = {"__name__": "room"}
        exec(compile(code, "example", "exec"), room)
        torch.manual_seed(0)
        curves.append(losses_of(room["SeriesModel"](), 30))
    assert curves[0] == pytest.approx(curves[1], rel=1e-2)
    assert curves[0][-1] < 0.5 * curves[0][0]
