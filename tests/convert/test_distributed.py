"""Two processes (gloo, CPU) with half a batch each find the gradients that one finds of the whole batch."""

from pathlib import Path

import pytest
import torch
from numba_passes import skip_without
from waiting import run_together

from .distributed_worker import model_and_batch

KINDS = ("ddp", "replaced-in-ddp", "fsdp")


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("numba", ["numba", "plain"])
def test_two_processes_agree_with_one(numba: str, tmp_path: Path) -> None:
    skip_without(numba)
    worker = str(Path(__file__).with_name("distributed_worker.py"))
    run_together(*([worker, str(rank), str(tmp_path), numba, *KINDS] for rank in range(2)))
    model, batch = model_and_batch()
    model(batch).square().mean().backward()
    for kind in KINDS:
        for rank in range(2):
            gradients = torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=True)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=f"{kind}: {name}")
