"""Two processes (gloo, CPU) with half a batch each find the gradients that one finds of the whole batch."""

import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
from numba_passes import skip_without

from .distributed_worker import model_and_batch


@pytest.mark.slow
@pytest.mark.parametrize("numba", ["numba", "plain"])
@pytest.mark.parametrize("kind", ["ddp", "replaced-in-ddp", "fsdp"])
def test_two_processes_agree_with_one(kind: str, numba: str, tmp_path: Path) -> None:
    skip_without(numba)
    worker = Path(__file__).with_name("distributed_worker.py")
    command = [sys.executable, str(worker), kind]
    processes = [Popen([*command, str(rank), str(tmp_path), numba], stderr=PIPE, text=True) for rank in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors
    model, batch = model_and_batch()
    model(batch).square().mean().backward()
    for rank in range(2):
        gradients = torch.load(tmp_path / f"gradients-{rank}.pt", weights_only=True)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
