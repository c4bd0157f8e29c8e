"""One of two processes that share a model or a batch; run by models/test_distributed.py.

    python distributed_worker.py RANK FOLDER [numba] [plain]

Writes the loss and the gradients of the whole model, for each of KINDS, to FOLDER/WAY-KIND-RANK.pt. With numba it must
have entered the compiled passes, plain none.
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from numba_passes import passes_entered
from torch import Tensor, nn

import fasttfm
import fasttfm.nn
from fasttfm.models import Transformer, TransformerConfig


class Problem(NamedTuple):
    """A model and what it is trained on."""

    model: nn.Module
    batch: list[Tensor]
    loss: Callable[..., Tensor]
    """Of a batch, or of a part of one."""


def transformer() -> Problem:
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 128, "heads": 8, "d_ff": 192, "encoder_layers": 2, "decoder_layers": 2}
    model = Transformer(TransformerConfig(**fields, dropout=0.0, norm_first=True, final_norm=True, max_length=48))
    # half of it enters the passes compiled by numba
    source, target = torch.randint(4, 31, (16, 34)), torch.randint(4, 31, (16, 33))
    lengths = [torch.tensor([34, 5, 2, 33] * 4), torch.tensor([32, 3, 4, 31] * 4)]
    batch = [source, target[:, :-1].contiguous(), target[:, 1:].contiguous(), *lengths]
    return Problem(model, batch, lambda *part: model.loss(*part)[0])


def encoder() -> Problem:
    """torch.nn's, to be replaced."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 8, 192, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(128))
    # half of it enters a pass without dropout too: the softmax of short rows, or attention's loop
    return Problem(model, [torch.randn(64, 12, 128)], lambda x: loss_of_output(model(x)))


def loss_of_output(y: Tensor) -> Tensor:
    """Mean square of some channels; over all it would be constant after a LayerNorm, its gradients rounding errors."""
    return y[..., :8].square().mean()


def layers_of(model: nn.Module) -> list[nn.Module]:
    stacks = [model] if hasattr(model, "layers") else [model.encoder, model.decoder]
    return [layer for stack in stacks for layer in stack.layers]


def fsdp(problem: Problem) -> Callable[..., Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    for module in (*layers_of(problem.model), problem.model):
        fully_shard(module, mesh=mesh)
    return problem.loss


def tensor_parallel(problem: Problem) -> Callable[..., Tensor]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in layers_of(problem.model):
        parallelize_module(layer, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
    return problem.loss


def replaced_fsdp(problem: Problem) -> Callable[..., Tensor]:
    assert not fasttfm.replace_modules(problem.model).left
    return fsdp(problem)


def ddp(problem: Problem) -> Callable[..., Tensor]:
    wrapped = nn.parallel.DistributedDataParallel(problem.model)  # the loss holds it until backward ends
    assert not fasttfm.replace_modules(wrapped).left
    assert type(problem.model.layers[0]) is fasttfm.nn.TransformerEncoderLayer
    return lambda x: loss_of_output(wrapped(x))


def replaced_ddp(problem: Problem) -> Callable[..., Tensor]:
    fasttfm.replace_modules(problem.model)
    return ddp(problem)


KINDS: dict[str, tuple[Callable[[], Problem], Callable[[Problem], Callable[..., Tensor]], int]] = {
    "fsdp": (transformer, fsdp, 2),
    "tensor-parallel": (transformer, tensor_parallel, 1),
    "ddp that is replaced": (encoder, ddp, 2),
    "replaced in ddp": (encoder, replaced_ddp, 2),
    "replaced in fsdp": (encoder, replaced_fsdp, 2),
}
"""Kind -> the problem, how its model is shared (which returns the loss of a part), and parts of the batch."""


def whole(x: Tensor) -> Tensor:
    """A tensor of which each process may hold a part."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def main(rank: int, folder: Path, *ways: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    for way, (kind, (make, share, parts)) in itertools.product(ways, KINDS.items()):
        entered = passes_entered(way == "numba")
        problem = make()
        loss_of = share(problem)
        loss = loss_of(*(x.chunk(parts)[rank % parts] for x in problem.batch))
        loss.backward()
        found = {"loss": loss.detach()} | {name: whole(p.grad) for name, p in problem.model.named_parameters()}
        torch.save(found, folder / f"{way}-{kind}-{rank}.pt")
        assert bool(entered) == (way == "numba"), (way, kind, entered)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
