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
    """Sums gradients over ranks, in buckets.

    A parameter that no rank reached keeps no gradient, as in a single process: the optimizer leaves it alone.
    """

    def __init__(self, parameters: Sequence[Tensor], workers: Workers, bucket: int = BUCKET) -> None:
        """parameters: leaves in model order; the last one's gradient is complete first."""
        self._workers = workers
        self._parameters = list(reversed(parameters))
        counts = [parameter.numel() for parameter in self._parameters]
        self._buckets = _buckets(counts, bucket)
        """Parameters [begin, end) of each bucket."""
        self._messages: list[Tensor] = []
        """Each bucket's gradients, then for each of its parameters how many ranks reached it."""
        self._views: list[Tensor] = []
        self._reached: list[Tensor] = []
        self._bucket_of: dict[int, int] = {}
        for number, (begin, end) in enumerate(self._buckets):
            own, sizes = self._parameters[begin:end], counts[begin:end]
            message = torch.zeros(sum(sizes) + len(own), dtype=torch.float32, device=own[0].device)
            *views, reached = message.split([*sizes, len(own)])
            self._messages.append(message)
            self._views += [view.view_as(parameter) for view, parameter in zip(views, own)]
            self._reached.append(reached)
            self._bucket_of |= {id(parameter): number for parameter in own}
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
        reached = [True] * len(self._parameters)
        if any(parameter.grad is None for parameter in self._parameters):  # only then wait for the device
            reached = torch.cat(self._reached).bool().tolist()
        for parameter, view, is_reached in zip(self._parameters, self._views, reached):
            parameter.grad = view if is_reached else None

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
        gradients = [parameter.grad for parameter in self._parameters[begin:end]]
        filled = [(view, gradient) for view, gradient in zip(self._views[begin:end], gradients) if gradient is not None]
        self._reached[number].fill_(1.0)
        if len(filled) < len(gradients):
            self._messages[number].zero_()
            self._reached[number].copy_(torch.tensor([gradient is not None for gradient in gradients], device="cpu"))
        if filled:
            torch._foreach_copy_([view for view, _ in filled], [gradient for _, gradient in filled])
        self._started.append(self._workers.begin_to_add_up(self._messages[number]))


def _buckets(counts: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Split into ranges [begin, end) of at least `least` elements each, except the last."""
    buckets, begin, elements = [], 0, 0
    for number, count in enumerate(counts):
        elements += count
        if elements >= least or number == len(counts) - 1:
            buckets.append((begin, number + 1))
            begin, elements = number + 1, 0
    return buckets
