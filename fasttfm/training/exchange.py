"""All-reduce of gradients in buckets, each as soon as its last gradient is complete.

Communication overlaps with the backward pass of earlier layers. That hides latency of a network or of links between
GPUs, not work: two ranks on two cores copy and add on the cores they train on. Buckets hold fixed parameters in a fixed
order, so all ranks send the same buckets in the same order and results are reproducible.
Source: Li et al. 2020, PyTorch Distributed, section 3.2 (gradient bucketing, overlap of computation and communication).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fasttfm.training.workers import Workers

BUCKET = 2_000_000
"""Minimum elements of a bucket, 8 MB. Smaller buckets start earlier and cost more messages."""


class GradientExchange:
    """Gradients to sum over ranks, in one tensor (P,) that is split into buckets."""

    def __init__(self, parameters: Sequence[Tensor], workers: Workers, bucket: int = BUCKET) -> None:
        """parameters: leaves in model order; the last one's gradient is complete first."""
        self._workers = workers
        self._parameters = list(reversed(parameters))
        counts = [parameter.numel() for parameter in self._parameters]
        message = torch.zeros(sum(counts), dtype=torch.float32, device=self._parameters[0].device)
        self._views = [part.view_as(p) for part, p in zip(message.split(counts), self._parameters)]
        self._buckets = _buckets(counts, bucket)
        """Parameters [begin, end) of each bucket."""
        self._parts = message.split([sum(counts[begin:end]) for begin, end in self._buckets])
        self._bucket_of: dict[int, int] = {}
        for number, (begin, end) in enumerate(self._buckets):
            self._bucket_of |= {id(parameter): number for parameter in self._parameters[begin:end]}
        self._missing: list[int] | None = None
        """Incomplete gradients per bucket; None: send nothing during the backward pass."""
        self._started: list[Callable[[], None]] = []
        """Calls that wait for the buckets sent so far, in order."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def expect_last(self) -> None:
        """Send buckets during the next backward pass, the last of the update."""
        self._missing = [end - begin for begin, end in self._buckets]

    def finish(self) -> None:
        """Send the remaining buckets, wait for all and set the sums as gradients; once per update on each rank."""
        self._missing = None
        while len(self._started) < len(self._buckets):
            self._send()
        for wait in self._started:
            wait()
        self._started = []
        for parameter, view in zip(self._parameters, self._views):
            parameter.grad = view

    def _note(self, parameter: Tensor) -> None:
        """Hook: the gradient of parameter is complete."""
        if self._missing is None:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while len(self._started) < len(self._buckets) and self._missing[len(self._started)] == 0:
            self._send()

    def _send(self) -> None:
        """Start the all-reduce of the next bucket."""
        number = len(self._started)
        begin, end = self._buckets[number]
        pairs = [(view, p.grad) for view, p in zip(self._views[begin:end], self._parameters[begin:end])]
        filled = [(view, gradient) for view, gradient in pairs if gradient is not None]
        if len(filled) < len(pairs):
            self._parts[number].zero_()
        if filled:
            torch._foreach_copy_([view for view, _ in filled], [gradient for _, gradient in filled])
        self._started.append(self._workers.begin_to_add_up(self._parts[number]))


def _buckets(counts: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Split into ranges [begin, end) of at least `least` elements each, except the last."""
    buckets, begin, elements = [], 0, 0
    for number, count in enumerate(counts):
        elements += count
        if elements >= least or number == len(counts) - 1:
            buckets.append((begin, number + 1))
            begin, elements = number + 1, 0
    return buckets
