"""A case of the benchmarks: what is run, on which inputs, by whom, and what a clock must be able to tell."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.measure import numerics
from benchmarks.measure.providers import Absent, Provider
from fasttfm.kernels.proof.costs import Cost

LEVELS = ("smoke", "quick", "standard", "full")
"""smoke: the smallest shapes, to see that everything runs; its times mean nothing."""
GRADIENT_PASSES = ("backward", "forward+backward")
PURE_PASSES = ("forward", "training forward", *GRADIENT_PASSES)
"""Same inputs, same answer: their works have no state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings that all cases of a run have in common."""

    device: torch.device
    dtype: torch.dtype
    training_dtype: torch.dtype | None = None
    """Of the matrix products of a training step; None: dtype."""
    level: str = "standard"
    """One of LEVELS: which cases and shapes a group returns."""
    seed: int = 0
    threads: int = 1

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def small_memory(self) -> bool:
        """A GPU on which the float64 reference of 25,000 tokens by a large vocabulary does not fit."""
        return self.on_gpu and torch.cuda.get_device_properties(self.device).total_memory < 48 << 30

    @property
    def rounds_of_long_runs(self) -> int | None:
        """Timed runs a provider where one takes seconds on a CPU; None: as many as the time allows."""
        return None if self.on_gpu else {"smoke": 1, "quick": 3, "standard": 5, "full": 10}[self.level]

    def at_least(self, level: str) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)


@dataclass(slots=True, kw_only=True)
class Work:
    """Work of a case: inputs, and who computes what from them."""

    inputs: Callable[[int], tuple[Any, ...]]
    providers: Mapping[str, Provider | Absent]
    reference: Provider
    """Computes the right answer from the inputs cast to float64; a module in float64 where parameters take part."""
    without_dropout: Mapping[str, Provider | Absent] | None = None
    """The same providers with dropout off, which is what the check compares. The timed ones must then differ from run
    to run, or dropout was left out."""
    plain: str = "torch eager"
    """The provider whose error bounds the others': twice its own, plus a floor (see numerics.allowed)."""
    error: Callable[[Any, Any], float] = numerics.relative_error
    """Of a provider's answer (output first, then gradients) against the reference's."""
    measure: str = "max |x - float64| / max |float64|"
    """Definition of error(), for the record."""
    allowed: float | None = None
    """Bound of that error where the rule above is not meant."""
    gradient: Callable[[Tensor], Tensor] = numerics.cotangent
    """The gradient that reaches an output, in the passes that have one."""
    overwrites: frozenset[str] = frozenset()
    """Providers that are documented to write over their inputs: each run gets a copy, made before the clock."""
    unit: str | None = None
    """Of the throughput, such as target tokens/s; units() of it are done by a run on these inputs."""
    units: Callable[..., float] | None = None
    warm_up: int = 2
    """Runs before the clock, after the first and the checks."""
    rounds: int | None = None
    """Exactly so many timed runs a provider, where a run is long; otherwise as many as `seconds` allow."""
    details: Callable[[Any], dict[str, Any]] | None = None
    """Facts for the record from a provider's answer, such as its share of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One piece of work on one shape, in one pass."""

    group: str
    name: str
    shape: dict[str, Any]
    dtype: str
    passes: str
    make: Callable[[], Work] = field(repr=False, compare=False)
    cost: Cost | None = None
    """Least cost of the pass for any implementation; None if not counted."""

    @property
    def title(self) -> str:
        shape = " ".join(f"{key}={value}" for key, value in self.shape.items())
        return f"{self.name} {shape} {self.dtype} {self.passes}"


class Clock(Protocol):
    """Interface of a device's clock for run(); tests bring their own."""

    name: str
    """Name of the timed passes, for the record."""

    def microseconds(self, run: Callable[[], Any]) -> float:
        """Return the time of one run, from cold caches, with everything that it started finished."""

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Most memory that one run has allocated beyond what there was before; None where nothing counts it."""

    def launches(self, run: Callable[[], Any]) -> int | None:
        """Device launches of one run; None where they cannot be seen."""


@dataclass(slots=True)
class Entry:
    """Facts known so far of one provider."""

    function: Any
    """The provider; None where it is absent."""
    status: str = "timed"
    reason: str | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None
    launches: int | None = None
    error: float | None = None
    allowed: float | None = None
    times: list[float] = field(default_factory=list)
    units: list[float] = field(default_factory=list)
    """Of the inputs of each timed run."""
    details: dict[str, Any] | None = None
    """Work.details() of the last timed run."""

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason
        self.forget()

    def forget(self) -> None:
        """Drop the timed runs."""
        self.times, self.units = [], []
