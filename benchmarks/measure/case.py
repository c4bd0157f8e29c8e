"""Benchmark cases, their work, and the settings of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import numerics
from benchmarks.measure.providers import Absent, Provider
from fasttfm.kernels.proof.costs import Cost

LEVELS = ("smoke", "quick", "standard", "full")
"""smoke: the smallest shapes, to check that everything runs; its times are meaningless."""
GRADIENT_PASSES = ("backward", "forward+backward")
PURE_PASSES = ("forward", "training forward", *GRADIENT_PASSES)
"""Passes without state: equal inputs give equal results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings shared by all cases of a run."""

    device: torch.device
    dtype: torch.dtype
    training_dtype: torch.dtype | None = None
    """Dtype of matrix products in a training step; None: `dtype`."""
    level: str = "standard"
    """One of LEVELS; selects the cases and shapes of a group."""
    seed: int = 0
    threads: int = 1

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def training_dtype_name(self) -> str:
        return str(self.training_dtype or self.dtype).removeprefix("torch.")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def small_memory(self) -> bool:
        """Return whether the float64 reference of 25,000 tokens by a large vocabulary does not fit on this GPU."""
        return self.on_gpu and torch.cuda.get_device_properties(self.device).total_memory < 48 << 30

    @property
    def rounds_of_long_runs(self) -> int | None:
        """Timed runs per provider for work that takes seconds on a CPU; None: as many as the time allows."""
        return None if self.on_gpu else {"smoke": 1, "quick": 3, "standard": 5, "full": 10}[self.level]

    def at_least(self, level: str) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)


@dataclass(slots=True, kw_only=True)
class Work:
    """Inputs of a case, its providers and its reference."""

    inputs: Callable[[int], tuple[Any, ...]]
    """Returns the i-th tuple of arguments; torch is seeded before each call."""
    providers: Mapping[str, Provider | Absent]
    reference: Provider
    """Computes the expected result from inputs cast to float64; a float64 module if there are parameters."""
    without_dropout: Mapping[str, Provider | Absent] | None = None
    """The same providers without dropout, for the check; two runs of the timed ones must then differ."""
    trained: Mapping[str, nn.Module] | None = None
    """The models that the timed providers train: these two runs start from the same weights."""
    plain: str = "torch eager"
    """Provider whose error bounds the others' (numerics.allowed)."""
    error: Callable[[Any, Any], float] = numerics.relative_error
    """Error of a provider's result (outputs, then gradients) against the reference."""
    measure: str = "max |x - float64| / max |float64|"
    """Definition of error(), for the record."""
    allowed: float | None = None
    """Fixed bound on the error, instead of one relative to `plain`."""
    gradient: Callable[[Tensor], Tensor] = numerics.cotangent
    """Gradient of an output, in passes with a backward."""
    overwrites: frozenset[str] = frozenset()
    """Providers documented to overwrite their inputs: each run gets a copy, made before the clock starts."""
    unit: str | None = None
    """Unit of the throughput, such as target tokens/s; units(*inputs) is their number in one run."""
    units: Callable[..., float] | None = None
    warm_up: int = 2
    """Untimed runs after the first run and the checks."""
    rounds: int | None = None
    """Exact number of timed runs per provider, for long runs; None: as many as the time allows."""
    details: Callable[[Any], dict[str, Any]] | None = None
    """Extra fields for the record from a provider's result, such as its share of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation on one shape, in one pass."""

    group: str
    name: str
    shape: dict[str, Any]
    dtype: str
    passes: str
    make: Callable[[], Work] = field(repr=False, compare=False)
    cost: Cost | None = None
    """Minimum cost of the pass for any implementation; None if not counted."""

    @property
    def title(self) -> str:
        shape = " ".join(f"{key}={value}" for key, value in self.shape.items())
        return f"{self.name} {shape} {self.dtype} {self.passes}"


@dataclass(slots=True)
class Entry:
    """State and measurements of one provider."""

    function: Any
    """The provider; None if absent."""
    status: str = "timed"
    reason: str | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None
    launches: int | None = None
    error: float | None = None
    allowed: float | None = None
    times: list[float] = field(default_factory=list)
    units: list[float] = field(default_factory=list)
    """Work.units() of each timed run."""
    details: dict[str, Any] | None = None
    """Work.details() of the last timed run."""
