"""Interface of training tasks: what differs between kinds of models."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from fasttfm.config import RunConfig, Values
from fasttfm.errors import UserError
from fasttfm.store.checkpoint import read_weights
from fasttfm.store.model_dir import CONFIG_FILE
from fasttfm.store.steps import resolve_checkpoint
from fasttfm.store.vocabulary import checkpoint_vocabulary, vocabulary_digest
from fasttfm.store.weights import load_weights
from fasttfm.training.protocols import TrainingBatches
from fasttfm.training.validation import DividedValidator


class Task(ABC):
    """Creates data, configuration, model, batches and validator of a run (fasttfm.training.run)."""

    @abstractmethod
    def open(self, data_dir: Path) -> Any:
        """Open a prepared directory as store.model_dir.Data. Raises UserError for any other."""

    @abstractmethod
    def build(self, values: Values, data: Any) -> RunConfig:
        """Build the configuration, completed from the data. Raises UserError for values that do not fit."""

    @abstractmethod
    def model(self, config: Any) -> Any:
        """Create a TrainableModel with random weights on the CPU; config: the section `model`."""

    @abstractmethod
    def batches(self, config: Any, data: Any) -> TrainingBatches:
        """Create the training batches; config: from build()."""

    @abstractmethod
    def validator(self, config: Any, data: Any, device: torch.device) -> DividedValidator[Any]:
        """Create the validator; config: from build()."""

    def initialise(self, model: Any, init_from: Path, model_dir: Path) -> None:
        """Initialize a model from a checkpoint, or from a model directory's best one.

        Raises UserError for another vocabulary or other shapes.
        """
        if not init_from.exists():
            raise UserError(f"--init-from {init_from}: does not exist: give a checkpoint or a model directory")
        checkpoint = resolve_checkpoint(init_from) if (init_from / CONFIG_FILE).is_file() else init_from
        trained_with = checkpoint_vocabulary(checkpoint)
        if trained_with is not None and trained_with != vocabulary_digest(model_dir):
            model = init_from if (init_from / CONFIG_FILE).is_file() else "MODEL"
            raise UserError(
                f"--init-from {init_from}: was trained with another vocabulary than the data: prepare them with that "
                f"of its model (fasttfm prepare --spm {model})"
            )
        load_weights(model, self.weights_for(model, read_weights(checkpoint)), checkpoint)

    def weights_for(self, model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Select the weights of a checkpoint that initialize a model: by default all."""
        return weights
