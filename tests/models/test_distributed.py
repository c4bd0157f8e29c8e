"""Two processes (gloo, CPU) that share a model by FSDP2 or by tensor parallelism find the gradients that one finds."""

import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
from numba_passes import skip_without

from .distributed_worker import model_and_batch


@pytest.mark.slow
@pytest.mark.parametrize("numba", ["numba", "plain"])
@pytest.mark.parametrize("kind", ["fsdp", "tensor-parallel"])
def test_two_processes_agree_with_one(kind: str, numba: str, tmp_path: Path) -> None:
    skip_without(numba)
    worker = Path(__file__).with_name("distributed_worker.py")
    processes = [
        Popen([sys.executable, str(worker), kind, str(rank), str(tmp_path), numba], stderr=PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors
    model, batch = model_and_batch()
    loss = model.loss(*batch)[0]
    loss.backward()
    actual = [torch.load(tmp_path / f"found-{rank}.pt", weights_only=True) for rank in range(2)]
    halves = 2 if kind == "fsdp" else 1  # of the batch, over which FSDP averages gradients
    total = sum(each["loss"] for each in actual) * halves / 2
    torch.testing.assert_close(total, loss.detach(), rtol=1e-5, atol=1e-5)
    for each in actual:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(each[name] * halves, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
