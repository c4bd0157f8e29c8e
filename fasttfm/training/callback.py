"""Callbacks of other programs while a model trains: W&B, MLflow, a chart of one's own.

    class Printer(Callback):
        def on_validate(self, record, translations):
            print(record["step"], record["bleu"], translations[0])

    train(values, data, model, callbacks=[Printer()])

Rank 0 alone calls, between two updates, from the thread that trains: training waits for what a method does, and ends
with what it raises. TensorBoard is such a callback (fasttfm.training.tensorboard).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Callback(Protocol):
    """Base class of callbacks: override the methods that you need; the others do nothing.

    A record is a line of train.log.jsonl (see fasttfm.training.log): `kind`, `step` and numbers by name. After a resume
    records that come after the checkpoint come again.
    """

    def on_log(self, record: Mapping[str, Any]) -> None:
        """Called with numbers of the last `log_interval` updates (kind train), of a skipped update (skipped), or
        the settings that --resume-with has changed (resumed)."""
        return

    def on_validate(self, record: Mapping[str, Any], translations: Sequence[str]) -> None:
        """Called with a validation (kind valid), and at the end with those of the best and the last checkpoint by the
        search that users get (final) and of the averaged checkpoint (average).

        translations: one a validation pair; none where only the loss is validated.
        """
        return

    def on_save(self, checkpoint: Path) -> None:
        """Called with a checkpoint's directory once it is completely on the disk."""
        return
