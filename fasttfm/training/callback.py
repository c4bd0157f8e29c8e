"""Training callbacks, for W&B, MLflow or plots of your own.

    class Printer(Callback):
        def on_validate(self, record, translations):
            print(record["step"], record["bleu"], translations[0])

    train(values, data, model, callbacks=[Printer()])

Only rank 0 calls them, between two updates in the training thread: training waits for a method, and stops if it raises.
TensorBoard is such a callback (fasttfm.training.tensorboard).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Callback(Protocol):
    """Base class of callbacks; override the methods you need.

    A record is a line of train.log.jsonl (see fasttfm.training.log): `kind`, `step` and numbers by name. After a resume
    the records after the checkpoint are repeated.
    """

    def on_log(self, record: Mapping[str, Any]) -> None:
        """Called for the last `log_interval` updates (kind train), a skipped update (skipped), and settings changed by
        --resume-with (resumed)."""
        return

    def on_validate(self, record: Mapping[str, Any], translations: Sequence[str]) -> None:
        """Called for a validation (kind valid), and at the end for best and last checkpoints with the final decoding
        (final) and the averaged checkpoint (average).

        translations: one per validation pair; empty if only the loss is validated.
        """
        return

    def on_save(self, checkpoint: Path) -> None:
        """Called with a checkpoint's directory once it is on disk."""
        return
