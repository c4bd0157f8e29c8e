"""Updates as CUDA graphs: batches are copied into buffers, one set a shape (there are a few dozen, data/shapes.py)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

from torch import Tensor, nn

from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch, TokenBatches
from fasttfm.models.plain import hooked
from fasttfm.system.graphs import Graphs
from fasttfm.training.protocols import TrainingBatches
from fasttfm.training.workers import Workers

DEVICES = {"cuda"}
"""Types of devices that train from fixed addresses."""
_TENSORS = [name for name, kind in get_type_hints(Batch).items() if kind is Tensor]


def why_uncaptured(module: nn.Module, batches: TrainingBatches, config: TrainingConfig, workers: Workers) -> str | None:
    """The reason, for a person, that updates cannot be captured; None where they can."""
    reasons = {
        "several workers exchange gradients": workers.size > 1,
        "packed batches are of ever new shapes": config.packed,
        "these batches are of ever new shapes": not isinstance(batches, TokenBatches),
        "a module has hooks": any(map(hooked, module.modules())),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def run_on_batch(graphs: Graphs, run: Callable[[Any], None], batch: Batch | None) -> None:
    """Run on a batch in buffers, None without one; batches of one shape must come with one and the same function."""
    if batch is None:
        graphs(lambda: run(None), None)
        return

    def on_buffers(*buffers: Tensor) -> None:
        # the counts of this batch are not those of the next one of its shape: whoever reads them would be wrong
        run(replace(batch, **dict(zip(_TENSORS, buffers)), source_tokens=-1, target_tokens=-1))

    graphs(on_buffers, batch.shape, [getattr(batch, name) for name in _TENSORS])
