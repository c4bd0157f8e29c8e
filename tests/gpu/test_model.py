"""A training pass on the device: against float64 on the CPU, packed and padded, with its number of launches."""

import pytest
import torch
from launch_limits import IN_HALF, MOST_LAUNCHES

from benchmarks.cases import synthetic
from fasttfm.functional import backend
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.models import Transformer, TransformerConfig, stack

LENGTHS = (27, 9, 31), (22, 30, 4)


def model_and_batch(norm_first):
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=500, d_model=128, heads=2, d_ff=256, encoder_layers=2, decoder_layers=2, dropout=0.0,
        norm_first=norm_first, final_norm=norm_first,
    )  # fmt: skip
    model = Transformer(config)
    source, target = torch.zeros(3, 31, dtype=torch.int64), torch.zeros(3, 31, dtype=torch.int64)
    for row, (s, t) in enumerate(zip(*LENGTHS)):
        source[row, :s] = torch.randint(4, 500, (s,))
        target[row, : t + 1] = torch.randint(4, 500, (t + 1,))
    target_in = target[:, :-1].clone()
    for row, t in enumerate(LENGTHS[1]):
        target_in[row, t:] = 0
    return model, (source, target_in, target[:, 1:], *(torch.tensor(side) for side in LENGTHS))


def run(model, batch, precision=None, **options):
    model.zero_grad()
    device = batch[0].device.type
    with torch.autocast(device, precision or torch.bfloat16, enabled=precision is not None):
        loss, _, tokens = model.loss(*batch, **options)
    (loss / tokens).backward()
    return {"loss": (loss / tokens).detach()} | {name: p.grad.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16], ids=str)
def test_loss_and_gradients_err_at_most_twice_as_much_as_pytorch(norm_first, packed, precision, device, ieee):
    if precision == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        pytest.skip("no bfloat16 on this device")
    model, batch = model_and_batch(norm_first)
    exact = run(model.double(), batch)
    model, batch = model.float().to(device), [x.to(device) for x in batch]
    options = {"packed_tokens": tuple(map(sum, LENGTHS))} if packed else {}
    actual = run(model, batch, precision, **options)
    with backend("torch"):
        plain = run(model, batch, precision, **options)
    for name, true in exact.items():
        # by the norm: rounding of a ReLU input near 0 can switch the contribution of a token to a gradient
        error, theirs = ((x[name].double().cpu() - true).norm() for x in (actual, plain))
        assert error <= 2 * theirs + (1e-5 if precision is None else 2e-2) * true.norm() + 1e-6, name


def test_a_layer_as_one_autograd_node_has_the_same_gradients(device, ieee, monkeypatch):
    model, batch = model_and_batch(False)
    model, batch = model.to(device), [x.to(device) for x in batch]
    actual = run(model, batch)
    monkeypatch.setattr(stack, "may_run", lambda: False)  # operator by operator
    plain = run(model, batch)
    for name, expected in plain.items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_launches_no_more_than_counted_without_a_device(device, precision):
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=512, d_model=128, heads=2, d_ff=256, attention_dropout=0.1, relu_dropout=0.1)
    model = Transformer(config).to(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    batch = synthetic.batch(4, 20, 0.3, 512, seed=0).to(device)
    share = torch.tensor(1.0 / batch.target_tokens, device=device)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
            loss, _ = model.batch_loss(batch)
        loss.backward(share)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with backend("triton"), LaunchLog() as log:
        step()
    assert log.total <= MOST_LAUNCHES["short"] + (IN_HALF if precision == torch.bfloat16 else 0), log.table()
