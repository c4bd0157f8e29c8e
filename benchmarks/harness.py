"""Runs one case with every provider of it in turns, checks what each computes, and only then looks at the clock.

A group of benchmarks is a module with one function, `cases(setting) -> list[Case]`, and a line in
benchmarks/__main__.py. A Case names the work, its shape and pass, and knows how to make it; `make(setting)` returns a
Work when the case's turn has come, because all works together would not fit in memory. A Work brings

    inputs(i)      the i-th tuple of arguments, drawn anew; the harness has seeded torch before it calls
    providers      name -> function of those arguments, or Absent(how to install it)
    reference      the same function in float64: it is called with the inputs cast so

A provider never sees the clock, and never the same input twice in a row: the harness draws ROTATION inputs, hands them
round, empties the caches and synchronizes. It refuses inputs that are constant, a provider whose numbers are wrong
(status "wrong", no time), one that writes over its inputs, one that answers from memory when the same memory has new
contents, and one that leaves out the dropout it was given. What a pass means:

    forward            function(*inputs) without gradients, as in inference
    training forward   function(*inputs), keeping what its backward needs
    backward           the gradients of the outputs of a fresh graph, built before the clock starts on cold caches, with
                       respect to the inputs that ask for one and the parameters of a provider that is a module
    forward+backward   both, in one run
    step, decode, ...  function(*inputs) as it is; timed by the host between two synchronizations, not by device events

`run(case, setting, clock, seconds)` returns one record a provider (records.py says what is in it).
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from fasttfm.kernels.costs import Cost
from torch import Tensor, nn

from benchmarks import numerics, rows
from benchmarks.providers import UNSEEN, Absent, Provider
from benchmarks.records import Record
from benchmarks.rows import Ceilings

ROTATION = 4
"""Inputs that are handed round."""
LEVELS = ("smoke", "quick", "standard", "full")
"""smoke: the smallest shapes, to see that everything runs; its times mean nothing."""
GRADIENT_PASSES = ("backward", "forward+backward")
PURE_PASSES = ("forward", "training forward", *GRADIENT_PASSES)
"""Same inputs, same answer: their works have no state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a whole run of the benchmarks has in common."""

    device: torch.device
    dtype: torch.dtype
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

    def at_least(self, level: str) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)


@dataclass(slots=True, kw_only=True)
class Work:
    """What a case runs: inputs, and who computes what from them."""

    inputs: Callable[[int], tuple[Any, ...]]
    providers: Mapping[str, Provider | Absent]
    reference: Provider | None = None
    """Computes the right answer from the inputs cast to float64; a module in float64 where parameters take part."""
    without_dropout: Mapping[str, Provider | Absent] | None = None
    """The same providers with dropout off, which is what the check compares. The timed ones must then differ from run
    to run, or dropout was left out."""
    plain: str = "torch eager"
    """The provider whose error bounds the others': twice its own, plus a floor (see numerics.allowed)."""
    error: Callable[[Any, Any], float] = numerics.relative_error
    """Of a provider's answer (output first, then gradients) against the reference's."""
    measure: str = "max |x - float64| / max |float64|"
    """What error() measures, in words for the record."""
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
    """Facts for the record from a provider's last answer, such as a BLEU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One piece of work on one shape, in one pass."""

    group: str
    name: str
    shape: dict[str, Any]
    dtype: str
    passes: str
    make: Callable[[Setting], Work] = field(repr=False, compare=False)
    cost: Cost | None = None
    """What the pass must cost whoever computes it; None where nobody counted."""

    @property
    def title(self) -> str:
        shape = " ".join(f"{key}={value}" for key, value in self.shape.items())
        return f"{self.name} {shape} {self.dtype} {self.passes}"


class Clock(Protocol):
    """What run() needs of a device; tests bring their own."""

    name: str
    """What the times are, for the record."""

    def microseconds(self, run: Callable[[], Any]) -> float:
        """How long one run takes, from cold caches, with everything that it started finished."""

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Most memory that one run has allocated beyond what there was before; None where nothing counts it."""

    def launches(self, run: Callable[[], Any]) -> int | None:
        """Device launches of one run; None where they cannot be seen."""


class Rotation:
    """Hands inputs round: never one twice in a row, neither in all nor to one provider."""

    def __init__(self, draws: list[tuple]) -> None:
        if len(draws) < 3:
            raise ValueError(f"{len(draws)} inputs cannot be handed round: three are needed at least")
        self._draws = draws
        self._last = -1
        self._last_of: dict[str, int] = {}

    def next(self, provider: str) -> tuple:
        index = (self._last + 1) % len(self._draws)
        if index == self._last_of.get(provider):
            index = (index + 1) % len(self._draws)
        self._last = self._last_of[provider] = index
        return self._draws[index]


def draw(case: Case, work: Work, seed: int, count: int = ROTATION) -> list[tuple]:
    """The inputs of a work. Raises ValueError where they are constant or shared, so that a time would flatter."""
    draws = []
    for i in range(count):
        torch.manual_seed(seed + i)
        draws.append(work.inputs(i))
    numerics.refuse_flattering_inputs(draws)
    if case.passes == "forward":  # as in inference; some providers refuse to compute without a gradient otherwise
        for x in numerics.tensors(draws):
            x.requires_grad_(False)
    return draws


def _parameters(function: Provider) -> list[Tensor]:
    return [p for p in function.parameters() if p.requires_grad] if isinstance(function, nn.Module) else []


def prepare(passes: str, function: Provider, inputs: tuple, gradient: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    """What the clock is to see of a pass: for a backward alone, the forward is run here."""
    if passes not in GRADIENT_PASSES:
        return lambda: function(*inputs)
    wanted = [x for x in numerics.tensors(inputs) if x.requires_grad] + _parameters(function)

    def forward() -> list[Tensor]:
        outputs = [x for x in numerics.tensors(function(*inputs)) if x.requires_grad]
        if not outputs:
            raise RuntimeError("returned nothing that has a gradient")
        return outputs

    if passes == "forward+backward":

        def both() -> Any:
            outputs = forward()
            return torch.autograd.grad(outputs, wanted, [gradient(o) for o in outputs])

        return both
    outputs = forward()
    cotangents = [gradient(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, cotangents)


def answer(passes: str, function: Provider, inputs: tuple, gradient: Callable[[Tensor], Tensor]) -> Any:
    """What the check compares: the output; in passes with gradients [outputs], [input gradients], parameters' norm."""
    if passes not in GRADIENT_PASSES:
        with torch.set_grad_enabled(passes != "forward"):
            return function(*inputs)
    outputs = numerics.tensors(function(*inputs))
    differentiable = [x for x in outputs if x.requires_grad]
    parameters = _parameters(function)
    wanted = [x for x in numerics.tensors(inputs) if x.requires_grad]
    cotangents = [gradient(o) for o in differentiable]
    gradients = torch.autograd.grad(differentiable, wanted + parameters, cotangents)
    norms = [g.double().norm() for g in gradients[len(wanted) :]]  # the same however a module splits its parameters
    norm = [torch.stack(norms).norm()] if norms else []
    return [o.detach() for o in outputs], list(gradients[: len(wanted)]), norm


@dataclass(slots=True)
class Entry:
    """What is known so far of one provider."""

    function: Provider | None
    status: str = "timed"
    reason: str | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None
    launches: int | None = None
    error: float | None = None
    allowed: float | None = None
    times: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    last: Any = None

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason, self.times = status, reason, []


def _words(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def _first_call(entry: Entry, case: Case, work: Work, inputs: tuple, device: torch.device) -> None:
    assert entry.function is not None
    start = time.perf_counter()
    with torch.set_grad_enabled(case.passes != "forward"):
        prepare(case.passes, entry.function, inputs, work.gradient)()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    entry.compile_s = time.perf_counter() - start


def _check(entries: dict[str, Entry], case: Case, work: Work, inputs: tuple) -> None:
    """Gives every provider its error, and status "wrong" to one whose error is too large."""
    compared: Mapping[str, Any] = work.providers if work.without_dropout is None else work.without_dropout
    if work.reference is None:
        return
    expected = answer(case.passes, work.reference, numerics.in_float64(inputs), work.gradient)
    before = numerics.fingerprint(inputs)
    # the plain one first: the others' bound is made from its error
    for name in sorted((n for n, e in entries.items() if e.status == "timed"), key=lambda n: n != work.plain):
        entry = entries[name]
        try:
            own = numerics.copied(inputs) if name in work.overwrites else inputs
            found = answer(case.passes, compared[name], own, work.gradient)
        except Exception as error:
            entry.fail("refused", _words(error))
            continue
        entry.error = work.error(found, expected)
        plain = entries[work.plain].error if work.plain in entries and name != work.plain else None
        entry.allowed = numerics.allowed(case.dtype, plain) if work.allowed is None else work.allowed
        if not entry.error <= entry.allowed:
            entry.fail("wrong", f"error {entry.error:.3g} against the reference, {entry.allowed:.3g} is allowed")
        elif numerics.fingerprint(inputs) != before:
            entry.fail("wrong", "writes over its inputs")
        elif work.without_dropout is not None and name in work.providers:
            _check_dropout(entry, case, work, inputs)


def _check_dropout(entry: Entry, case: Case, work: Work, inputs: tuple) -> None:
    assert entry.function is not None
    one, other = (numerics.tensors(answer(case.passes, entry.function, inputs, work.gradient)) for _ in range(2))
    if all(torch.equal(a, b) for a, b in zip(one, other)):
        entry.fail("wrong", "two runs with dropout gave the same: it leaves dropout out")


def _check_memory(name: str, entry: Entry, case: Case, work: Work, draws: list[tuple], seed: int) -> None:
    """The same memory with new contents must give what new memory with these contents gives."""
    assert entry.function is not None
    function = entry.function if work.without_dropout is None else None
    if function is None or name in work.overwrites or case.passes not in PURE_PASSES or not numerics.tensors(draws[0]):
        return
    torch.manual_seed(seed + ROTATION)
    fresh = work.inputs(ROTATION)
    for x, like in zip(numerics.tensors(fresh), numerics.tensors(draws[0])):
        x.requires_grad_(like.requires_grad)
    if not numerics.overwrite(draws[0], fresh):
        return
    expected, found = (answer(case.passes, function, x, work.gradient) for x in (fresh, draws[0]))
    if not work.error(found, expected) <= numerics.allowed(case.dtype, None):
        entry.fail("wrong", "gave the same again when its inputs' memory had new contents: it answers from memory")


def _try(entries: dict[str, Entry], act: Callable[[str, Entry], None]) -> None:
    """act on every provider that still stands; one that raises is refused, in its own words."""
    for name, entry in entries.items():
        if entry.status == "timed":
            try:
                act(name, entry)
            except Exception as error:  # a provider that refuses these inputs is a result
                entry.fail("refused", _words(error))


def begun(
    case: Case, work: Work, given: Callable[[str], tuple], inputs: tuple, device: torch.device
) -> dict[str, Entry]:
    """Every provider called once and checked: what may be timed has status "timed"."""
    entries = {
        name: Entry(None, "absent", provider.install) if isinstance(provider, Absent) else Entry(provider)
        for name, provider in work.providers.items()
    }
    _try(entries, lambda name, entry: _first_call(entry, case, work, given(name), device))
    _check(entries, case, work, inputs)
    return entries


def run(
    case: Case,
    setting: Setting,
    clock: Clock,
    seconds: float,
    *,
    ceilings: Ceilings | None = None,
    machine: Mapping[str, Any] | None = None,
    least_rounds: int = 5,
    now: Callable[[], float] = time.monotonic,
) -> list[Record]:
    """One record for every provider of the case, timed in turns for about `seconds` altogether."""
    work = case.make(setting)
    entries = _measure(case, work, setting, clock, seconds, least_rounds, now)
    found = [rows.record(case, work, name, entry, setting, clock, ceilings, machine) for name, entry in entries.items()]
    del work, entries
    gc.collect()
    if "torch._dynamo" in sys.modules:  # so that the next case compiles for its own shape, and says how long that took
        torch._dynamo.reset()
    if setting.on_gpu:
        torch.cuda.empty_cache()
    return found


def _measure(
    case: Case,
    work: Work,
    setting: Setting,
    clock: Clock,
    seconds: float,
    least_rounds: int,
    now: Callable[[], float],
) -> dict[str, Entry]:
    draws = draw(case, work, setting.seed)
    rotation = Rotation(draws)

    def given(name: str) -> tuple:
        inputs = rotation.next(name)
        return numerics.copied(inputs) if name in work.overwrites else inputs

    entries = begun(case, work, given, draws[0], setting.device)

    def one(name: str, entry: Entry, look: Callable[[Callable[[], Any]], Any]) -> tuple[Any, tuple]:
        """look(run) at a run of this provider on its next inputs."""
        assert entry.function is not None
        inputs = given(name)
        with torch.set_grad_enabled(case.passes != "forward"):
            return look(prepare(case.passes, entry.function, inputs, work.gradient)), inputs

    def warm(name: str, entry: Entry) -> None:
        for _ in range(work.warm_up):
            one(name, entry, lambda act: act())
        if work.rounds is None:  # a run too long to repeat is not repeated to be counted
            entry.peak_bytes, _ = one(name, entry, clock.peak_bytes)
            if name not in UNSEEN:
                entry.launches, _ = one(name, entry, clock.launches)

    def timed(name: str, entry: Entry) -> None:
        def look(act: Callable[[], Any]) -> float:
            made: list[Any] = []  # dropped when the clock has stopped: freeing it is not the provider's work
            taken = clock.microseconds(lambda: made.append(act()))
            if work.details is not None:
                entry.last = made[0]
            return taken

        taken, inputs = one(name, entry, look)
        entry.times.append(taken)
        if work.units is not None:
            entry.rates.append(work.units(*inputs) / taken * 1e6)

    _try(entries, warm)
    order = random.Random(setting.seed)
    end = now() + seconds
    done = 0
    while any(e.status == "timed" for e in entries.values()):
        if done >= (work.rounds or least_rounds) and (work.rounds or now() >= end):
            break
        names = list(entries)
        order.shuffle(names)  # who follows whom changes from round to round
        _try({name: entries[name] for name in names}, timed)
        done += 1
    _try(entries, lambda name, entry: _check_memory(name, entry, case, work, draws, setting.seed))
    return entries
