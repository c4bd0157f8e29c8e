"""One of two processes that take half of a model or of a batch each; run by test_distributed.py.

python distributed_worker.py RANK FOLDER numba|plain KIND ...: writes the loss and the gradients of the whole model, for
each kind of fsdp and tensor-parallel, to FOLDER/KIND-RANK.pt, having entered the passes compiled by numba, or without
numba none.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fasttfm.models import Transformer, TransformerConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from numba_passes import passes_entered


def model_and_batch() -> tuple[Transformer, list[Tensor]]:
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 128, "heads": 8, "d_ff": 192, "encoder_layers": 2, "decoder_layers": 2}
    model = Transformer(TransformerConfig(**fields, dropout=0.0, norm_first=True, final_norm=True, max_length=48))
    # half of it enters the passes compiled by numba
    source, target = torch.randint(4, 31, (16, 34)), torch.randint(4, 31, (16, 33))
    lengths = [torch.tensor([34, 5, 2, 33] * 4), torch.tensor([32, 3, 4, 31] * 4)]
    return model, [source, target[:, :-1].contiguous(), target[:, 1:].contiguous(), *lengths]


def whole(x: Tensor) -> Tensor:
    """A tensor of which each process may hold a part."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def found_by(kind: str, rank: int) -> dict[str, Tensor]:
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
    return {"loss": loss.detach()} | {name: whole(p.grad) for name, p in model.named_parameters()}


def main(rank: int, folder: Path, numba: str, *kinds: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    for kind in kinds:
        entered = passes_entered(numba == "numba")
        torch.save(found_by(kind, rank), folder / f"{kind}-{rank}.pt")
        assert bool(entered) == (numba == "numba"), (kind, entered)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
