"""A training step of a small model, with the PTX of every kernel executed."""

import pytest
import torch
from executing import CHIPS

from fasttfm import functional
from fasttfm.kernels.proof.executed import executed
from fasttfm.models import Transformer, TransformerConfig
from ptx_check import executed as checked

SIZE = {"vocab_size": 64, "d_model": 64, "heads": 2, "d_ff": 128, "encoder_layers": 1, "decoder_layers": 1}


def step(model: Transformer, packed: bool) -> list[torch.Tensor]:
    """The loss and every gradient of one step."""
    torch.manual_seed(5)
    source, target = torch.randint(4, 64, (3, 11)), torch.randint(4, 64, (3, 10))
    lengths = torch.tensor([11, 7, 3]), torch.tensor([9, 10, 4])
    tokens = (int(lengths[0].sum()), int(lengths[1].sum())) if packed else None
    model.zero_grad()
    loss, _, _ = model.loss(source, target, target, *lengths, packed_tokens=tokens)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_tensors_on_the_device_run_kernels_eager_and_compiled():
    x = torch.randn(1, 2, 20, 64, dtype=torch.float16)
    with checked("sm_80") as machine:
        y = x.to("cuda")
        actual = functional.attention(y, y, y, causal=True)
        compiled = torch.compile(functional.attention, fullgraph=True)(y, y, y, causal=True)
    assert len(machine.launches) == 2
    assert torch.equal(actual, compiled)
    torch.testing.assert_close(actual, functional.attention(x, x, x, causal=True), rtol=0, atol=4e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("chip", CHIPS)
def test_a_training_step_equals_plain_pytorch(chip, packed):
    changes = {
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "relu_dropout": 0.1,
        "norm_first": packed,
        "final_norm": packed,
    }
    model = Transformer(TransformerConfig(**SIZE, **changes))
    with functional.backend("torch"):
        expected = step(model, packed)
    with executed(chip) as machine, functional.backend("triton"):
        actual = step(model, packed)
    assert len({(launch.name, launch.instructions) for launch in machine.launches}) >= 8
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-3, atol=2e-4)
