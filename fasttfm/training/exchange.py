"""Gradients summed over the ranks in buckets, each as soon as the backward pass has made the last gradient of it.

A bucket travels while the backward pass goes on with the layers before it. That hides waiting, for a network or for the
links between GPUs, and no work: two ranks on two cores copy and add up on the cores that they train on. Buckets are
of fixed parameters in a fixed order, so that every rank sends the same ones in the same order, and two runs add up the
same numbers in the same order.
Source: Li et al. 2020, PyTorch Distributed, section 3.2 (gradient bucketing, overlap of computation and communication).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fasttfm.training.workers import Workers

BUCKET = 2_000_000
"""Gradients of a bucket, at least: 8 MB. Smaller ones start earlier and cost more messages."""


class GradientExchange:
    """The gradients of several ranks, in one tensor (P,) of which the buckets are parts."""

    def __init__(self, parameters: Sequence[Tensor], workers: Workers, bucket: int = BUCKET) -> None:
        """parameters: leaves in the order of the model, whose last one has its gradient first."""
        self._workers = workers
        self._parameters = list(reversed(parameters))
        counts = [parameter.numel() for parameter in self._parameters]
        message = torch.zeros(sum(counts), dtype=torch.float32, device=self._parameters[0].device)
        self._views = [part.view_as(p) for part, p in zip(message.split(counts), self._parameters)]
        self._buckets = _buckets(counts, bucket)
        """Numbers of the parameters [begin, end) of each."""
        self._parts = message.split([sum(counts[begin:end]) for begin, end in self._buckets])
        self._bucket_of: dict[int, int] = {}
        for number, (begin, end) in enumerate(self._buckets):
            self._bucket_of |= {id(parameter): number for parameter in self._parameters[begin:end]}
        self._missing: list[int] | None = None
        """Gradients that each bucket still waits for; None while nothing is to be sent."""
        self._started: list[Callable[[], None]] = []
        """Waiting calls of the buckets that have been sent, in order."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def expect_last(self) -> None:
        """The next backward pass is the last of the update: what it completes is sent."""
        self._missing = [end - begin for begin, end in self._buckets]

    def finish(self) -> None:
        """Send what has not been sent, wait for all, and give every parameter the sum as its gradient.

        Every rank calls it once an update, also one that had nothing to compute.
        """
        self._missing = None
        while len(self._started) < len(self._buckets):
            self._send()
        for wait in self._started:
            wait()
        self._started = []
        for parameter, view in zip(self._parameters, self._views):
            parameter.grad = view

    def _note(self, parameter: Tensor) -> None:
        """A gradient is complete."""
        if self._missing is None:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while len(self._started) < len(self._buckets) and self._missing[len(self._started)] == 0:
            self._send()

    def _send(self) -> None:
        """Begin to sum the next bucket over the ranks."""
        number = len(self._started)
        begin, end = self._buckets[number]
        given = [(view, p.grad) for view, p in zip(self._views[begin:end], self._parameters[begin:end])]
        filled = [(view, gradient) for view, gradient in given if gradient is not None]
        if len(filled) < len(given):
            self._parts[number].zero_()
        if filled:
            torch._foreach_copy_([view for view, _ in filled], [gradient for _, gradient in filled])
        self._started.append(self._workers.begin_to_add_up(self._parts[number]))


def _buckets(counts: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Consecutive numbers [begin, end) with at least so many elements each, but for the last."""
    buckets, begin, elements = [], 0, 0
    for number, count in enumerate(counts):
        elements += count
        if elements >= least or number == len(counts) - 1:
            buckets.append((begin, number + 1))
            begin, elements = number + 1, 0
    return buckets
