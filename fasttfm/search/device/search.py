"""Continuous batching on a device: engines by kind and length, cached per model."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from operator import is_
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError
from fasttfm.functional.backends import use_triton
from fasttfm.models.plain import Snapshot
from fasttfm.models.stack import Stack
from fasttfm.search.batches import SHORTEST
from fasttfm.search.decoder import positions_of
from fasttfm.search.device.capacity import refuse_more_than_free
from fasttfm.search.device.decoder import decodes, launches
from fasttfm.search.device.engine import Engine
from fasttfm.search.device.state import Sizes
from fasttfm.search.hypotheses import Hypothesis
from fasttfm.search.tasks import Task, Waiting, tasks_of

_KEPT = 4
"""Cached engines per model, with their memory and graphs; least recently used ones are dropped."""
_SLOTS = 1024
"""Maximum sentences per search in the kernels (kernels/search.py)."""


def takes(model: Any, config: DecodingConfig) -> bool:
    """Return whether DeviceSearch is equivalent to the model's modules. Call inside inference()."""
    models = getattr(model, "models", [model])
    device = next(model.parameters()).device
    return (device.type != "cpu" or use_triton(device)) and all(map(decodes, models))


class _Kept:
    """Idle engines of a model. Holds no reference to the model, so it dies with it."""

    def __init__(self, model: Any) -> None:
        self._own = _own(model)
        modules = [*model.modules()][1:]
        self._parts = Snapshot(each for each in modules if not isinstance(each, Stack))  # a stack stores prepared state
        self.engines: dict[tuple, Engine] = {}

    def unchanged(self, model: Any) -> bool:
        """Return whether the model's modules and configuration are unchanged."""
        own = _own(model)
        return len(own) == len(self._own) and all(map(is_, own, self._own)) and self._parts.unchanged()

    def take(self, key: tuple) -> Engine | None:
        """Remove and return the engine of this key, for exclusive use."""
        with _lock:
            return self.engines.pop(key, None)

    def give(self, key: tuple, engine: Engine) -> None:
        with _lock:
            self.engines.pop(key, None)
            self.engines[key] = engine
            if len(self.engines) > _KEPT:
                del self.engines[next(iter(self.engines))]


def _own(model: Any) -> list[Any]:
    """Everything that a search reads from the model object itself, and its modules."""
    return [type(model), model.config, *[*model.modules()][1:]]


def held_bytes(model: Any) -> int:
    """Memory of a model's cached engines."""
    kept = _of_models.get(model)
    return 0 if kept is None else sum(engine.held_bytes() for engine in kept.engines.values())


_of_models: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
_lock = Lock()
"""Guards the caches: several threads may search, even with one model."""


def _forget_idle() -> None:
    """Free all cached engines."""
    with _lock:
        for kept in [*_of_models.values()]:
            kept.engines.clear()


class DeviceSearch:
    """Search over a queue of sentences, if takes(). Use inside inference()."""

    def __init__(self, model: Any, config: DecodingConfig, *, banned: Sequence[Sequence[int]] = ()) -> None:
        """banned: see search_ids()."""
        self.model, self.config, self.banned = model, config, tuple(map(tuple, banned))
        self.device = next(model.parameters()).device
        self.waiting: deque[Waiting] = deque()
        self._engines: dict[tuple, Engine] = {}
        self._positions = positions_of(model)
        self._kernels = all(launches(each) for each in getattr(model, "models", [model]))
        with _lock:
            kept = _of_models.get(model)
            if kept is None or not kept.unchanged(model):
                kept = _of_models[model] = _Kept(model)
        self._kept = kept

    @property
    def idle(self) -> bool:
        """Return whether no sentence is running or waiting."""
        return not (self.waiting or self._engines)

    def drop(self, keys: Collection[Hashable]) -> None:
        """Cancel sentences: they leave without a result."""
        self.waiting = deque(each for each in self.waiting if each.key not in keys)
        for engine in self._engines.values():
            engine.drop(keys)

    def written(self) -> list[int]:
        """Tokens so far of the only hypothesis of the only sentence; waits for the device."""
        return [token for engine in self._engines.values() for token in engine.written()]

    def run(self) -> Iterator[tuple[Hashable, list[Hypothesis]]]:
        """Step until no sentence is left, yielding (key, config.nbest best hypotheses) as sentences finish."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[tuple[Hashable, list[Hypothesis]]]:
        """Admit waiting sentences, take a burst of steps, and return the sentences that finished."""
        members, self.waiting = list(self.waiting), deque()
        for _, error in self.join(members):
            raise error
        results: list[tuple[Hashable, list[Hypothesis]]] = []
        for key, engine in [*self._engines.items()]:
            results += [(task.waiting.key, hypotheses) for task, hypotheses in engine.advance()]
            if engine.idle:
                self._kept.give(key, self._engines.pop(key))
        return results

    def join(self, members: Sequence[Waiting]) -> list[tuple[Hashable, UserError]]:
        """Add sentences to the next step.

        Returns the keys and errors of sentences whose search needs more memory than is free.
        """
        by_config: dict[DecodingConfig, list[Waiting]] = {}
        for each in members:
            by_config.setdefault(each.config or self.config, []).append(each)
        by_kind: dict[tuple, list[Task]] = {}
        refused: list[tuple[Hashable, UserError]] = []
        for config, some in by_config.items():
            try:
                tasks = tasks_of(self.model, some, config)
            except UserError as error:
                refused += [(each.key, error) for each in some]
                continue
            shared = _kind(config)
            for task in tasks:
                lengths = self._room(task.limit + 1), self._room(len(task.waiting.source))
                by_kind.setdefault((shared, *lengths, task.allowed is not None), []).append(task)
        for kind, tasks in by_kind.items():
            try:
                self._engine(kind, tasks).waiting += tasks
            except UserError as error:
                refused += [(each.waiting.key, error) for each in tasks]
        return refused

    def _room(self, length: int) -> int:
        """Length rounded up to a power of two of at least 32, but at most the model's positions."""
        most = self._positions
        room = max(32, _power(length))
        return room if most is None else min(room, most)

    def _engine(self, kind: tuple, tasks: list[Task]) -> Engine:
        """An engine of this kind for these sentences: a running one if it has enough slots."""
        (shared, rows), steps, sources, selects = kind
        running = {key: engine for key, engine in self._engines.items() if key[0] == kind}
        count = len(tasks) + sum(each.searched + len(each.waiting) for each in running.values())
        longest = max(SHORTEST, *(len(task.waiting.source) for task in tasks))
        most = max(1, self.config.batch_tokens // longest)
        slots = 1 << (min(most, _SLOTS, _power(count)).bit_length() - 1)
        for (*_, theirs), engine in running.items():
            if theirs >= slots:
                return engine
        key = kind, self.banned, self._kernels, slots
        kept = self._kept.take(key)
        if kept is not None:
            kept.reset()
            engine = kept
        else:
            sizes = Sizes(slots, rows, rows, steps, sources, 2 * slots, self.model.config.vocab_size)
            try:
                refuse_more_than_free(self.model, sizes, self.device, longest)
            except UserError:
                _forget_idle()
                refuse_more_than_free(self.model, sizes, self.device, longest)
            engine = Engine(
                self.model, sizes, shared, self.device, kernels=self._kernels, banned=self.banned, selects=selects
            )
        self._engines[key] = engine
        return engine


@functools.lru_cache
def _kind(config: DecodingConfig) -> tuple[DecodingConfig, int]:
    """Key of an engine: the options that its steps depend on, others at their defaults, and rows per sentence."""
    names = ["no_repeat_ngram", "allow_unk"]
    if config.sampling:
        names += ["sampling", "sampling_topk", "sampling_topp", "temperature"]
    elif config.diverse_beam_groups > 1:
        names += ["beam", "diverse_beam_groups", "diverse_beam_strength"]
    shared = replace(DecodingConfig(), **{name: getattr(config, name) for name in names})
    return shared, config.nbest if config.sampling else config.beam


def _power(number: int) -> int:
    """The smallest power of two >= number."""
    return 1 << (number - 1).bit_length()
