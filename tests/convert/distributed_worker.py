"""One of two processes that train a replaced model on half a batch each; run by test_distributed.py.

python distributed_worker.py RANK FOLDER numba|plain KIND ...: writes the gradients of the whole model, for each kind of
ddp, replaced-in-ddp and fsdp, to FOLDER/KIND-RANK.pt, having entered the passes compiled by numba, or without numba
none.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fasttfm
import fasttfm.nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from numba_passes import passes_entered

E, H, N, S = 128, 8, 64, 12
"""Half a batch enters a pass compiled by numba without dropout too: the softmax of short rows, or attention's loop."""


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 192, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(E)), torch.randn(N, S, E)


def gradients_of(kind: str, rank: int) -> dict[str, torch.Tensor]:
    model, batch = model_and_batch()
    if kind != "replaced-in-ddp":
        fasttfm.replace_modules(model)
    half = batch.chunk(2)[rank]
    if kind != "fsdp":
        wrapped = nn.parallel.DistributedDataParallel(model)  # must live until backward ends: it holds the reducer
        assert not fasttfm.replace_modules(wrapped).left
        assert type(model.layers[0]) is fasttfm.nn.TransformerEncoderLayer
        wrapped(half).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(half).square().mean().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def main(rank: int, folder: Path, numba: str, *kinds: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    for kind in kinds:
        entered = passes_entered(numba == "numba")
        torch.save(gradients_of(kind, rank), folder / f"{kind}-{rank}.pt")
        assert bool(entered) == (numba == "numba"), (kind, entered)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
