"""Sharded training with FSDP2, for models that do not fit on one rank.

Every rank holds a shard of each weight, gradient and Adam moment, split along the first dimension. Weights of a layer
are gathered for its forward and backward pass; reducing its gradients overlaps with the backward pass of the layer
before. The optimizer sees shards as plain tensors.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fasttfm.models.stack import Stack
from fasttfm.store.weights import model_weights

if TYPE_CHECKING:
    from fasttfm.training.workers import Workers


def shard(model: nn.Module, device: torch.device, ranks: int) -> None:
    """Shard a model with the same weights on all ranks, possibly on the CPU, over the ranks' devices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    for layer in dict.fromkeys(layer for stack in stacks for layer in stack.layers):  # shared layers once
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # our layers return views, which nothing modifies in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the trainer divides by tokens; gloo has no mean
            module.set_force_sum_reduction_for_comms(True)


def local(tensor: Tensor) -> Tensor:
    """A view of this rank's shard; the tensor itself if it is not sharded."""
    return tensor.to_local().detach() if _is_divided(tensor) else tensor  # type: ignore[attr-defined]


def part_of(whole: Tensor, like: Any) -> Tensor:
    """This rank's shard of a full tensor, split like `like`."""
    if not _is_divided(like):
        return whole
    mesh = like.device_mesh
    parts = whole.chunk(mesh.size(), 0)
    rank = mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else whole[:0]


def divided(part: Tensor, like: Any) -> Tensor:
    """The DTensor of which part is this rank's shard, split like `like`; part itself if their shapes differ."""
    if not _is_divided(like) or part.shape != local(like).shape:
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensors: Mapping[str, Tensor], workers: Workers) -> dict[str, Tensor]:
    """Full copies of tensors on the CPU, on rank 0 only; all ranks must call it if they are sharded."""
    copies = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if _is_divided(tensor) else tensor  # type: ignore[attr-defined]
        if workers.is_first:
            copies[name] = full.detach().to("cpu", copy=True)
    return copies


def load_parts(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load full weights into a sharded model."""
    with torch.no_grad():
        for name, tensor in model_weights(model).items():
            local(tensor).copy_(part_of(weights[name], tensor))


def _is_divided(tensor: Tensor) -> bool:
    """Return whether tensor is a DTensor, without importing the module if nothing has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
