"""torch.export and torch.compile with dynamic lengths: one graph, correct at every length."""

import pytest
import torch
from public_surface import first, input_count, modules

LENGTHS = (11, 3, 2, 1, 15, 16, 17, 40, 100, 600)
"""Both sides of every backend threshold; the first, used for tracing, differs from all other sizes."""


def inputs(name: str, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, length, 16, generator=generator) for _ in range(input_count(name))]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", modules())
@pytest.mark.parametrize("named", [False, True])
def test_an_exported_module_is_right_at_every_length(name: str, named: bool) -> None:
    module = modules()[name].eval()
    length = torch.export.Dim("length", min=1, max=600) if named else torch.export.Dim.AUTO
    example = inputs(name, LENGTHS[0])
    dynamic = tuple({1: length} for _ in example)
    exported = torch.export.export(module, tuple(example), dynamic_shapes=dynamic).module()
    for count in LENGTHS:
        given = inputs(name, count)
        torch.testing.assert_close(first(exported(*given)), first(module(*given)), rtol=1e-4, atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", modules())
def test_a_compiled_module_is_one_graph_for_every_length(name: str) -> None:
    torch._dynamo.reset()
    module = modules()[name]
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph

    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend=count)
    for length in [length for length in LENGTHS if length > 1]:  # torch specializes on 1
        given = inputs(name, length)
        torch.testing.assert_close(first(compiled(*given)), first(module(*given)), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
