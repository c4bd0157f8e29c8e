"""Protocols that the trainer asks of a model and of batches, whatever is trained."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class TrainingBatch(Protocol):
    """Arguments of one call of the model."""

    @property
    def source_tokens(self) -> int:
        """Tokens without padding that are read only; 0 is allowed."""

    @property
    def target_tokens(self) -> int:
        """Number of terms of the loss."""

    @property
    def cells(self) -> int:
        """source_tokens + target_tokens, padding counted too."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers that the shapes of matrix products follow from."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Any:
        """The same batch on a device."""


class TrainableModel(Protocol):
    """A torch.nn.Module, with a loss."""

    @property
    def config(self) -> Any:
        """From which alone its class makes another one like it.

        d_model: what schedule noam computes the learning rate from.
        """

    def batch_loss(self, batch: Any, *, label_smoothing: float = 0.0, packed: bool = False) -> tuple[Tensor, Tensor]:
        """The loss to be minimised and the plain negative log-likelihood without gradient, 0-d each.

        Both are sums over the batch.target_tokens targets. packed: the layers shall see no padding, where the model has
        the choice.
        """

    def checkpoint_activations(self, enabled: bool = True) -> None:
        """Keep only what each layer begins with, and compute the rest again in the backward pass."""


class TrainingBatches(Protocol):
    """The batches of an epoch, in an order that follows from its number alone."""

    max_tokens: int
    """Most tokens of a batch."""
    skipped: int
    """Elements of the data that no batch has, for their length."""
    unit: str
    """Word for an element of the data, such as pair or row."""

    @property
    def shapes(self) -> int:
        """Different shapes of the batches of an epoch."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    @property
    def target_tokens(self) -> int:
        """Number of target tokens of an epoch."""

    @property
    def padding_ratio(self) -> float:
        """Share of padding in an epoch, in [0, 1]."""

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of numbers of elements, which ranks divide among them."""

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Any:
        """The TrainingBatch of an array of epoch(), or of a part of it; chance follows from epoch and indices alone."""

    def largest(self) -> np.ndarray:
        """The elements of a batch of the largest size."""
