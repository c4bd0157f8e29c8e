"""Base of all kinds of batches: their tensors go to a device together."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing_extensions import Self


class TensorBatch:
    """The base of frozen dataclasses whose fields are tensors, numbers and None."""

    __slots__ = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Self":
        """The same batch with its tensors on device; from pinned memory when it is a GPU and non_blocking."""
        moved = {}
        for field in fields(self):  # type: ignore[arg-type]
            tensor = getattr(self, field.name)
            if isinstance(tensor, torch.Tensor):
                pinned = tensor.pin_memory() if non_blocking else tensor
                moved[field.name] = pinned.to(device, non_blocking=non_blocking)
        return replace(self, **moved)  # type: ignore[type-var]
