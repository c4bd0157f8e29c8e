"""Protocols of the models and batches that the trainer accepts."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class TrainingBatch(Protocol):
    """Inputs of one model call."""

    @property
    def source_tokens(self) -> int:
        """Input tokens without loss terms or padding; may be 0."""

    @property
    def target_tokens(self) -> int:
        """Number of loss terms."""

    @property
    def cells(self) -> int:
        """source_tokens + target_tokens, including padding."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes that determine the shapes of matrix products."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Any:
        """The same batch on a device."""


class TrainableModel(Protocol):
    """A torch.nn.Module with a loss."""

    @property
    def config(self) -> Any:
        """The only constructor argument of its class; has vocab_size and, for the noam schedule, d_model."""

    def batch_loss(self, batch: Any, *, label_smoothing: float = 0.0, packed: bool = False) -> tuple[Tensor, Tensor]:
        """The loss to minimize, and the negative log-likelihood without gradient, 0-d each.

        Both are sums over batch.target_tokens targets. packed: skip padding if supported.
        """

    def checkpoint_activations(self, enabled: bool = True) -> None:
        """Save only the inputs of layers and recompute the rest in the backward pass."""


class TrainingBatches(Protocol):
    """The batches of an epoch; their order depends only on the epoch's number."""

    max_tokens: int
    """Maximum tokens per batch."""
    skipped: int
    """Elements of the data that were left out for their length."""
    unit: str
    """Name of an element of the data: pair or row."""

    @property
    def shapes(self) -> int:
        """Number of distinct batch shapes in an epoch."""

    def __len__(self) -> int:
        """Batches per epoch."""

    @property
    def target_tokens(self) -> int:
        """Target tokens per epoch."""

    @property
    def padding_ratio(self) -> float:
        """Share of padding in an epoch, in [0, 1]."""

    def epoch(self, epoch: int) -> Sequence[np.ndarray]:
        """The batches of an epoch as arrays of element indices, which ranks share."""

    def batch(self, indices: np.ndarray, epoch: int = 0) -> Any:
        """The TrainingBatch of an array from epoch(), or a part; random draws depend on epoch and indices only."""

    def largest(self) -> np.ndarray:
        """Element indices of a batch of the largest size."""
