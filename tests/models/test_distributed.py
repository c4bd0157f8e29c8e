"""Two processes (gloo, CPU) get the loss and gradients of one, with the loops that numba compiles and without.

With FSDP2 and tensor parallelism for our model, DDP and FSDP2 for a torch.nn model with replaced modules.
"""

from pathlib import Path

import distributed_worker
import pytest
import torch
from waiting import run_together

from fasttfm.cpu import step_passes


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    ways = ["numba", "plain"] if step_passes.usable() else ["plain"]
    run_together(*([distributed_worker.__file__, str(rank), str(tmp_path), *ways] for rank in range(2)))
    for kind, (make, _, parts) in distributed_worker.KINDS.items():
        model, batch, loss_of = make()
        loss = loss_of(*batch)
        loss.backward()
        ours = make is distributed_worker.transformer
        # our loss is a sum over targets, whose gradients FSDP averages; theirs is a mean
        times = parts if ours else 1
        for way in ways:
            results = [torch.load(tmp_path / f"{way}-{kind}-{rank}.pt", weights_only=True) for rank in range(2)]
            mean = sum(each["loss"] for each in results) / 2
            torch.testing.assert_close(mean * times, loss.detach(), rtol=1e-5, atol=1e-5, msg=f"{way}: {kind}")
            for each in results:
                for name, parameter in model.named_parameters():
                    atol = 1e-6 * parameter.grad.abs().max().item()  # float32 sums that cancel: of the tensor's scale
                    close = {"rtol": 1e-4, "atol": atol, "msg": f"{way}: {kind}: {name}"}
                    torch.testing.assert_close(each[name] * times, parameter.grad, **close)
