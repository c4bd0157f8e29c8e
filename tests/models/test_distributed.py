"""Two processes (gloo, CPU) that share a model by FSDP2 or by tensor parallelism find the gradients that one finds."""

from pathlib import Path

import pytest
import torch
from numba_passes import skip_without
from waiting import run_together

from .distributed_worker import model_and_batch

KINDS = {"fsdp": 2, "tensor-parallel": 1}
"""How many parts of the batch there are, over which FSDP averages gradients."""


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("numba", ["plain", "numba"])
def test_two_processes_agree_with_one(numba: str, tmp_path: Path) -> None:
    skip_without(numba)
    worker = str(Path(__file__).with_name("distributed_worker.py"))
    run_together(*([worker, str(rank), str(tmp_path), numba, *KINDS] for rank in range(2)))
    model, batch = model_and_batch()
    loss = model.loss(*batch)[0]
    loss.backward()
    for kind, halves in KINDS.items():
        actual = [torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=True) for rank in range(2)]
        total = sum(each["loss"] for each in actual) * halves / 2
        torch.testing.assert_close(total, loss.detach(), rtol=1e-5, atol=1e-5)
        for each in actual:
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(
                    each[name] * halves, parameter.grad, rtol=1e-4, atol=1e-5, msg=f"{kind}: {name}"
                )
