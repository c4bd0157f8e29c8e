"""What a training step of fasttfm.nn.Transformer launches: torch.nn's modules with their import changed."""

import pytest
import torch
from uncomputed import without_computing

import fasttfm.nn
from fasttfm.functional import backend
from fasttfm.kernels.proof.launch_log import LaunchLog

from .twins import padding

WIDTH, HEADS, LAYERS = 16, 2, 6


def training_step(norm_first: bool, batch_first: bool, masked: bool) -> LaunchLog:
    """Six and six layers, narrow: of width nothing depends but how many launches walk over the lists of parameters."""
    torch.manual_seed(0)
    model = fasttfm.nn.Transformer(
        WIDTH, HEADS, LAYERS, LAYERS, 32, 0.1, batch_first=batch_first, norm_first=norm_first
    )
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # the first step also makes Adam's moments
    optimizer.zero_grad()
    shapes = ((2, 5, WIDTH), (2, 4, WIDTH)) if batch_first else ((5, 2, WIDTH), (4, 2, WIDTH))
    source, target = (torch.randn(shape, requires_grad=True) for shape in shapes)
    hidden = padding(5, 3) if masked else None
    with backend("triton"), without_computing(), LaunchLog() as log:
        output = model(source, target, tgt_is_causal=True, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
        output.backward(torch.ones_like(output))
        optimizer.step()
        optimizer.zero_grad()
    return log


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm_first", "batch_first", "masked", "most"),
    [(False, True, True, 374), (True, True, True, 422), (False, False, False, 344)],
    ids=["post-norm", "pre-norm", "sequence first, no padding"],
)
def test_a_training_step_of_six_and_six_layers(norm_first, batch_first, masked, most, capsys):
    log = training_step(norm_first, batch_first, masked)
    with capsys.disabled():
        print(f"\n{log.table()}")
    assert log.total <= most
    assert not {"stack", "slice_backward"} & log.others.keys()  # gradients are written where one product reads them
