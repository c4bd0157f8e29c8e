"""A model that is divided among the ranks: FSDP2, for what does not fit into one.

Every rank holds a part of each weight, of its gradient and of Adam's moments, cut along the first dimension. A layer's
weights are gathered when it computes, forward and backward, and its gradients are summed into the parts while the
backward pass goes on with the layer before. The optimizer sees the parts as plain tensors.
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
    """Divide a model, whose weights are the same on all ranks and may be on the CPU, among the ranks' devices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    for layer in dict.fromkeys(layer for stack in stacks for layer in stack.layers):  # a shared one once
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # a layer's output is a view, as all of ours are; nothing writes to one in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the trainer divides by tokens, and gloo has no mean
            module.set_force_sum_reduction_for_comms(True)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; all of one that is not divided."""
    return tensor.to_local().detach() if _is_divided(tensor) else tensor  # type: ignore[attr-defined]


def part_of(whole: Tensor, like: Any) -> Tensor:
    """This rank's part of a whole tensor, divided as `like` is."""
    if not _is_divided(like):
        return whole
    mesh = like.device_mesh
    parts = whole.chunk(mesh.size(), 0)
    rank = mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else whole[:0]


def divided(part: Tensor, like: Any) -> Tensor:
    """The DTensor that a rank's part, of the shape of its part of `like`, belongs to."""
    if not _is_divided(like) or part.shape != local(like).shape:
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensors: Mapping[str, Tensor], workers: Workers) -> dict[str, Tensor]:
    """Copies of tensors as they are now, whole and on the CPU, for rank 0; the others get nothing.

    All ranks must call it for a model that is divided.
    """
    copies = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if _is_divided(tensor) else tensor  # type: ignore[attr-defined]
        if workers.is_first:
            copies[name] = full.detach().to("cpu", copy=True)
    return copies


def load_parts(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put whole weights into a divided model."""
    with torch.no_grad():
        for name, tensor in model_weights(model).items():
            local(tensor).copy_(part_of(weights[name], tensor))


def _is_divided(tensor: Tensor) -> bool:
    """Return whether it is a DTensor; what makes some is imported then."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
