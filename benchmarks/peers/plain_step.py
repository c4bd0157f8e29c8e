"""The training step and the loss that a good PyTorch user writes: autocast, clipping, fused Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch
from fasttfm.data.tokenizer import PAD


def summed_cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """Label-smoothed cross entropy of logits (B, L, V) summed over the targets (B, L) that are no padding, 0-d.

    float32, which autocast makes cross_entropy anyhow.
    """
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=PAD,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


class Step:
    """One training step: forward, backward, clipping where asked for, Adam."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Batch, float], Tensor],
        training: TrainingConfig,
        autocast: torch.dtype | None,
        *,
        compiled: bool = False,
    ) -> None:
        """loss: of (model, batch, label_smoothing), summed over the target tokens.

        autocast: dtype of matrix products, None for float32; float16 scales its loss. compiled: torch.compile.
        """
        self.model, self.loss, self.training, self.autocast = model.train(), loss, training, autocast
        self.device = next(model.parameters()).device
        self.forward = torch.compile(model) if compiled else model
        self.adam = torch.optim.Adam(
            model.parameters(), lr=training.lr, betas=training.adam_betas, eps=training.adam_eps, fused=True
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=autocast == torch.float16)

    def __call__(self, batch: Batch, lr: float | None = None) -> Tensor:
        """The loss a target token before the step, 0-d without gradient."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            value = self.loss(self.forward, batch, self.training.label_smoothing) / batch.target_tokens
        self.scaler.scale(value).backward()
        if self.training.clip_norm:
            self.scaler.unscale_(self.adam)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip_norm)
        if lr is not None:
            for group in self.adam.param_groups:
                group["lr"] = lr
        self.scaler.step(self.adam)
        self.scaler.update()
        self.adam.zero_grad(set_to_none=True)
        return value.detach()
