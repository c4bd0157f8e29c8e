"""Base class of batches: moves all tensors to a device."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing_extensions import Self


class TensorBatch:
    """Base of frozen dataclasses whose fields are tensors, numbers or None."""

    __slots__ = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Self":
        """A copy with all tensors on `device`; non_blocking copies from pinned memory."""
        moved = {}
        for field in fields(self):  # type: ignore[arg-type]
            tensor = getattr(self, field.name)
            if isinstance(tensor, torch.Tensor):
                pinned = tensor.pin_memory() if non_blocking else tensor
                moved[field.name] = pinned.to(device, non_blocking=non_blocking)
        return replace(self, **moved)  # type: ignore[type-var]
