"""Measures on this CPU from how many elements on training's compiled passes beat PyTorch's route (`fasttfm tune`).

Each pass of thresholds.LEAST is timed against that route at rising sizes, the two in turns, with as many threads as
PyTorch has. It is taken from the size on from which it is faster at all larger ones, in every dtype that is measured.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fasttfm import functional as F
from fasttfm.cpu import thresholds
from fasttfm.cpu.training_passes import drawn
from fasttfm.functional.attention import torch_route
from fasttfm.functional.attention.arguments import Options
from fasttfm.kernels.choice_cache import Answer
from fasttfm.timing import Clock, Timing, measure

LEAST_GAIN = 0.03
"""A pass must take at least so much less time: timings repeat to a few percent."""
SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
"""Elements; a whole number of each kind of row below."""
_WIDTH, _KEYS = 512, 128
_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Measured:
    """One pass, with its time and that of PyTorch's route at every size."""

    name: str
    least: int
    times: dict[tuple[str, int], tuple[float, float]]
    """By dtype and elements, in microseconds: the pass, PyTorch's route."""

    @property
    def shipped(self) -> int:
        return thresholds.LEAST[self.name].value

    @property
    def changed(self) -> bool:
        return self.least != self.shipped

    def as_answer(self) -> Answer:
        """The answer that the cache keeps; times are those of all sizes together."""
        return thresholds.as_answer(self.name, self.least, self._together(self.least), self._together(self.shipped))

    def line(self) -> str:
        """Return the line that a person wants to read."""
        taken = "never taken" if self.least == thresholds.NEVER else f"taken from {self.least:,} elements on"
        ratios = "; ".join(
            f"{dtype} {', '.join(f'{other / own:.2f}' for (d, _), (own, other) in self.times.items() if d == dtype)}"
            for dtype in dict.fromkeys(dtype for dtype, _ in self.times)
        )
        return f"{self.name}: {taken} ({self.shipped:,} ships); times as fast as PyTorch, by size: {ratios}"

    def _together(self, least: int) -> float:
        return sum(own if elements >= least else other for (_, elements), (own, other) in self.times.items())


def tune(
    clock: Clock, *, quick: bool, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Measured]:
    """Measures pass after pass. quick: float32 alone, and shorter."""
    dtypes = (torch.float32,) if quick else (torch.float32, torch.bfloat16)
    for done, name in enumerate(thresholds.LEAST):
        progress(done, len(thresholds.LEAST))
        times = {
            (str(dtype).removeprefix("torch."), elements): _times(name, elements, dtype, clock, 0.05 if quick else 0.2)
            for dtype in dtypes
            for elements in SIZES
        }
        yield Measured(name, _least(times), times)
    progress(len(thresholds.LEAST), len(thresholds.LEAST))


def _times(name: str, elements: int, dtype: torch.dtype, clock: Clock, seconds: float) -> tuple[float, float]:
    run = work(name, elements, dtype)

    def provider(least: int) -> Callable[[], None]:
        def call() -> None:
            with thresholds.forced({name: least}):
                run()

        return call

    ways = {"pass": provider(0), "torch": provider(thresholds.NEVER)}
    timings = measure(ways, clock, seconds=seconds, warm_up=1, least_runs=_ROUNDS)
    own, other = (each.p20_us if isinstance(each, Timing) else float("inf") for each in timings.values())
    return own, other


def _least(times: dict[tuple[str, int], tuple[float, float]]) -> int:
    least = thresholds.NEVER
    for elements in sorted({elements for _, elements in times}, reverse=True):
        if any(own > other * (1 - LEAST_GAIN) for (_, n), (own, other) in times.items() if n == elements):
            break
        least = elements
    return least


def work(name: str, elements: int, dtype: torch.dtype) -> Callable[[], Any]:
    """A call that enters the pass of that name, if it is taken, with a tensor of so many elements."""
    rows, seed = elements // _WIDTH, torch.tensor([1])
    if name == "keep_mask":
        return lambda: drawn((1, rows, _WIDTH), 0.1, seed, 0)
    if name.startswith("softmax"):
        scores = torch.randn(1, elements // (32 * _KEYS), 32, _KEYS).to(dtype)
        options = Options(None, None, False, 0, 0.0, 0.125, None, 0)
        if name == "softmax":
            return lambda: torch_route.weights(scores, options.scale, options)
        weights = torch_route.weights(scores, options.scale, options)
        return lambda: torch_route.scores_gradient(scores.clone(), weights, None, options, False)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    if name.startswith("gelu_tanh"):  # products of eight numbers a sum, which take little of the time
        inputs = [tensor(rows, 8), tensor(_WIDTH, 8), tensor(_WIDTH), tensor(8, _WIDTH), tensor(8)]
        return _either(name, lambda: F.feed_forward(*inputs, activation="gelu_tanh"), inputs)
    if name.startswith("cross_entropy"):
        logits, target = tensor(rows, _WIDTH), torch.arange(rows) % _WIDTH
        return _either(name, lambda: F.cross_entropy(logits, target, label_smoothing=0.1)[0], [logits])
    if name == "embedding_gradient":
        tokens, table = (torch.arange(rows) % _WIDTH)[None], tensor(_WIDTH, _WIDTH)
        return _either(name, lambda: F.embed(tokens, table, scale=2.0, dropout_p=0.1, seed=seed), [table])
    others = ((rows, _WIDTH), (_WIDTH,), (_WIDTH,))
    inputs = [tensor(rows, _WIDTH), *(tensor(*shape, dtype=torch.float32) for shape in others)]
    x, residual, weight, bias = inputs
    norm = functools.partial(
        F.residual_layer_norm, dropout_p=0.0 if name.endswith("without_dropout") else 0.1, seed=seed
    )
    return _either(name, lambda: norm(x, residual, weight, bias)[0], inputs)


def _either(name: str, forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], Any]:
    """The forward call without gradients, or for a pass named so the backward one alone."""
    if not name.endswith("gradient"):
        return torch.no_grad()(forward)
    output = forward()
    grad = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)
