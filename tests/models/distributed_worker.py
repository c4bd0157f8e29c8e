"""One of two processes that take half of a model or of a batch each; run by test_distributed.py.

python distributed_worker.py fsdp|tensor-parallel RANK FOLDER: writes the loss and the gradients of the whole model to
FOLDER/found-RANK.pt.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fasttfm.models import Transformer, TransformerConfig


def model_and_batch() -> tuple[Transformer, list[Tensor]]:
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 16, "heads": 2, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 2}
    model = Transformer(TransformerConfig(**fields, dropout=0.0, norm_first=True, final_norm=True, max_length=16))
    source, target = torch.randint(4, 31, (4, 7)), torch.randint(4, 31, (4, 6))
    lengths = [torch.tensor([7, 5, 2, 6]), torch.tensor([5, 3, 4, 5])]
    return model, [source, target[:, :-1].contiguous(), target[:, 1:].contiguous(), *lengths]


def whole(x: Tensor) -> Tensor:
    """A tensor of which each process may hold a part."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def main(kind: str, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    model, batch = model_and_batch()
    mesh = dist.init_device_mesh("cpu", (2,))
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in [*model.encoder.layers, *model.decoder.layers]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        batch = [x.chunk(2)[rank] for x in batch]
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for layer in [*model.encoder.layers, *model.decoder.layers]:
            assert isinstance(layer, nn.Module)
            parallelize_module(layer, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
    loss = model.loss(*batch)[0]
    loss.backward()
    results = {"loss": loss.detach()} | {name: whole(p.grad) for name, p in model.named_parameters()}
    torch.save(results, folder / f"found-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
