"""Search engine for one kind of options on a device: the host queues sentences, starts bursts of steps, reads results.

A step is one CUDA graph. The host starts a burst and then reads the flags of the previous burst, which were copied in
the meantime, so it never waits for a step. On other devices, as in tests, the same code runs without graphs.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import EOS, PAD
from fasttfm.models.step_layers import Call, Operations
from fasttfm.search.device import choice, decoder
from fasttfm.search.device.capacity import needed_bytes
from fasttfm.search.device.decoder import StepDecoder
from fasttfm.search.device.state import NEVER, NOTHING, Settings, Sizes, State, column
from fasttfm.search.hypotheses import Hypothesis, distinct, length_penalty
from fasttfm.search.tasks import Task
from fasttfm.system.graphs import Graphs

BURST = 2
"""Steps between two reads of the flags; a finished sentence costs up to 2 * BURST - 1 extra steps. Reading takes the
host 50 us, a step 100 us or more. Reasoned, not run on a GPU."""
_CPU = torch.device("cpu")


class _Results(NamedTuple):
    """Results in flight to the host."""

    tasks: list[Task | None]
    tensors: list[Tensor]
    """Scores and log-probabilities (n, N) float32; ends (n, N), tokens and parents (n, T, K)."""


class Engine:
    """Searches a queue of sentences in the slots of a State. Use inside inference()."""

    def __init__(
        self,
        model: Any,
        sizes: Sizes,
        config: DecodingConfig,
        device: torch.device,
        *,
        kernels: bool,
        banned: Sequence[Sequence[int]] = (),
        selects: bool = False,
    ) -> None:
        """model: a Transformer that decodes(), or an ensemble of such. config: of its options the engine uses those of
        sampling and of groups, no_repeat_ngram and allow_unk. kernels: run steps as kernel launches. banned: see
        search_ids(). selects: every sentence has its own list of tokens."""
        self.sizes, self.device = sizes, device
        self.model = weakref.proxy(model)  # a cached engine must not keep the model alive
        self.state = state = State(sizes, device)
        self._rules = choice.Rules(state, config, banned, selects=selects)
        if kernels:
            from fasttfm.models.step_launches import KernelOperations
            from fasttfm.search.device import launches  # Triton may not be installed
        embed = launches.embed if kernels else decoder.embed
        operations = KernelOperations(state) if kernels else Operations(state)
        self._decoders = [
            StepDecoder(each, state, embed, operations) for each in getattr(model, "models", [self.model])
        ]
        self._draws = choice.Draws(state, config) if config.sampling else None
        self._groups = choice.Groups(state, config) if config.diverse_beam_groups > 1 and not config.sampling else None
        self._graphs = Graphs(device, "a search's step", "search on the CPU (--device cpu)")
        self._admits: Call = launches.admit(state) if kernels else partial(choice.admit, state)
        self._choices: list[Call] | None = None
        """Kernel launches that replace _choose(), if available."""
        if kernels and len(self._decoders) == 1 and self._draws is None and self._groups is None:
            self._choices = launches.choose_beams(state, self._decoders[0].logits, self._rules)
        self._flags = [self._host(state.finished) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._graphs.captures else None
        self.waiting: deque[Task] = deque()
        self.reset()

    def _host(self, tensor: Tensor) -> Tensor:
        """Host buffer for a copy."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU, pin_memory=self._graphs.captures)

    def reset(self) -> None:
        """Drop all sentences and clear the state."""
        self.state.reset()
        self.waiting.clear()
        self._free = deque(range(self.sizes.places))
        self._tasks: dict[int, tuple[int, Task | None]] = {}
        """Place -> number and task of its sentence; task None: cancelled."""
        self._results: _Results | None = None
        self._bursts = self._queued = self._number = 0
        for flags in self._flags:
            flags.fill_(NOTHING)

    def held_bytes(self) -> int:
        """Memory kept between searches: approximately its tensors, plus what its graphs have reserved."""
        return needed_bytes(self.model, self.sizes) + self._graphs.held_bytes()

    @property
    def idle(self) -> bool:
        """Return whether no sentence is running or waiting."""
        return not (self.waiting or self._tasks or self._results)

    @property
    def searched(self) -> int:
        """Number of queued sentences without results yet."""
        return sum(task is not None for _, task in self._tasks.values())

    def advance(self) -> list[tuple[Task, list[Hypothesis]]]:
        """Queue waiting sentences, start a burst, and return sentences that ended before it, with their hypotheses."""
        self._admit()
        now, before = self._bursts % 2, (self._bursts + 1) % 2
        self._graphs(self.step, None, times=BURST)
        self._flags[now].copy_(self.state.finished, non_blocking=self._graphs.captures)
        self._bursts += 1
        found = self._taken(before, now)
        if not self._tasks:  # another burst would be wasted
            found += self._taken(now, now)
        return found

    def _taken(self, which: int, mark: int) -> list[tuple[Task, list[Hypothesis]]]:
        """Return results that have arrived, and request those of sentences that the flags of a burst mark as ended.

        which, mark: flags of the burst to read, and of the latest burst, behind which the requested copies are queued.
        """
        if self._events is not None:
            self._events[which].synchronize()
        found = list(self._hypotheses(self._results)) if self._results is not None else []
        self._results = None
        ended = [
            place
            for place, number in enumerate(self._flags[which].tolist())
            if place in self._tasks and self._tasks[place][0] == number
        ]
        if ended:
            self._send_for(ended)
        if self._events is not None:
            self._events[mark].record(torch.cuda.current_stream(self.device))
        return found

    def _send_for(self, places: list[int]) -> None:
        """Start copying the results of places to the host, and free the places."""
        state, index = self.state, self._on_device(torch.tensor(places, device=_CPU))
        kept = (state.found_scores, state.found_log_probabilities, state.found_ends, state.tokens, state.parents)
        tensors = [each.index_select(0, index) for each in kept]
        arrived = [self._host(each) for each in tensors]
        for ours, theirs in zip(arrived, tensors):
            ours.copy_(theirs, non_blocking=self._graphs.captures)
        self._results = _Results([self._tasks.pop(place)[1] for place in places], arrived)
        self._free.extend(places)

    def drop(self, keys: Collection[Hashable]) -> None:
        """Cancel sentences: running ones end with the next step, without results."""
        self.waiting = deque(each for each in self.waiting if each.waiting.key not in keys)
        if self._results is not None:
            tasks = self._results.tasks
            tasks[:] = [None if task is None or task.waiting.key in keys else task for task in tasks]
        for place, (number, task) in self._tasks.items():
            if task is not None and task.waiting.key in keys:
                self.state.settings[place, column("enough")].zero_()
                self._tasks[place] = number, None

    def written(self) -> list[int]:
        """Tokens so far of the first row of the first slot; waits for the device."""
        place, count = int(self.state.sentence[0]), int(self.state.position[0])
        return self.state.tokens[place, :count, 0].tolist()

    # ------------------------------------------------------------------------------------------------ on the device

    def step(self) -> None:
        """Extend the hypotheses of all slots by one token; captured by a graph."""
        self._admits()
        logits = [each() for each in self._decoders]
        if self._choices is None:
            self._choose(logits[0] if len(logits) == 1 else self.model.together(logits))
        else:
            for launch in self._choices:
                launch()

    def _choose(self, logits: Tensor) -> None:
        """Choose tokens by logits (R, V), in PyTorch operations."""
        values = choice.log_probabilities(self.state, logits, self._rules)
        if self._draws is not None:
            self._draws.choose(self.state, values)
        elif self._groups is not None:
            self._groups.choose(self.state, values)
        else:
            choice.choose_beams(self.state, values)

    # ---------------------------------------------------------------------------------------------------- sentences

    def _admit(self) -> None:
        """Fill free places with waiting sentences, once there are enough to be worth an encoder pass."""
        while self.waiting and self._free:
            count = min(len(self.waiting), len(self._free), self.sizes.slots)
            if count < min(len(self.waiting), self.sizes.slots // 2) and self._tasks:
                return
            self._fill([self.waiting.popleft() for _ in range(count)])

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Copy to the device without waiting."""
        tensor = tensor.pin_memory() if self._graphs.captures else tensor
        return tensor.to(self.device, non_blocking=self._graphs.captures)

    def _fill(self, tasks: list[Task]) -> None:
        """Store sentences in free places and queue them for the slots."""
        state, steps = self.state, self.sizes.steps
        places = [self._free.popleft() for _ in tasks]
        settings = np.empty((len(tasks), len(Settings._fields)), np.int64)
        forced = np.full((len(tasks), steps), NOTHING, np.int64)
        divisors = np.empty((len(tasks), steps), np.float32)
        for row, (place, task) in enumerate(zip(places, tasks)):
            settings[row] = self._settings(task)
            forced[row, : len(task.waiting.prefix)] = task.waiting.prefix
            forced[row, task.limit] = EOS
            divisors[row] = _penalties(task.config, steps)
            self._tasks[place] = int(settings[row, -1]), task
        index = self._on_device(torch.tensor(places, device=_CPU))
        self._encode(tasks, index)
        for whole, part in ((state.settings, settings), (state.forced, forced), (state.divisors, divisors)):
            whole.index_copy_(0, index, self._on_device(torch.from_numpy(part)))
        state.found_scores.index_fill_(0, index, -torch.inf)
        state.found_ends.index_fill_(0, index, NOTHING)
        if self._draws is not None:
            uniform = np.stack([task.uniform(steps, self.sizes.beam) for task in tasks])
            self._draws.uniform.index_copy_(0, index, self._on_device(torch.from_numpy(uniform)))
        if self._rules.selected is not None:
            self._select(tasks, index)
        ring = (self._queued + np.arange(len(tasks))) % self.sizes.places
        state.queue.index_copy_(0, self._on_device(torch.from_numpy(ring)), index)
        self._queued += len(tasks)
        state.tail += len(tasks)

    def _settings(self, task: Task) -> Settings:
        config = task.config
        rows = self.sizes.beam if config.sampling else config.beam
        greedy = rows == 1
        self._number += 1
        return Settings(
            limit=task.limit, least=config.min_len, beam=rows, nbest=self.sizes.nbest if self._groups else config.nbest,
            enough=rows if greedy or config.early_stopping else NEVER, ranks=1 if greedy else 2 * rows,
            source=len(task.waiting.source), number=self._number,
        )  # fmt: skip

    def _select(self, tasks: list[Task], index: Tensor) -> None:
        selected = torch.zeros(len(tasks), self.sizes.vocabulary, dtype=torch.bool, device=_CPU)
        for row, task in zip(selected, tasks):
            row[slice(None) if task.allowed is None else task.allowed] = True
        assert self._rules.selected is not None
        self._rules.selected.index_copy_(0, index, self._on_device(selected))

    def _encode(self, tasks: list[Task], index: Tensor) -> None:
        """Encode sources for places (n,), padded to few lengths and batch sizes so that few graphs are captured."""
        sources = [task.waiting.source for task in tasks]
        count = 1 << (len(tasks) - 1).bit_length()
        length = min(self.sizes.sources, max(16, 1 << (max(map(len, sources)) - 1).bit_length()))
        ids = np.full((count, length), PAD, np.int64)
        for row, source in zip(ids, sources):
            row[: len(source)] = source
        ids[len(tasks) :, 0] = EOS
        lengths = np.ones(count, np.int64)
        lengths[: len(tasks)] = [*map(len, sources)]
        places = torch.nn.functional.pad(index, (0, count - len(tasks)), value=self.sizes.places)
        inputs = self._on_device(torch.from_numpy(ids)), self._on_device(torch.from_numpy(lengths)), places
        self._graphs(self._remember, (count, length), inputs)

    def _remember(self, *inputs: Tensor) -> None:
        for each in self._decoders:
            each.remember(*inputs)

    # ------------------------------------------------------------------------------------------------------ results

    def _hypotheses(self, results: _Results) -> Iterator[tuple[Task, list[Hypothesis]]]:
        """Yield each task with its hypotheses, best first."""
        scores, log_probabilities, ends, tokens, parents = (tensor.numpy() for tensor in results.tensors)
        steps, rows = np.divmod(ends, self.sizes.beam)
        outputs = _traced(tokens, parents, steps, rows)
        found = zip(*(each.tolist() for each in (scores, log_probabilities, steps, rows)))
        for task, texts, columns in zip(results.tasks, outputs, found):
            if task is None:
                continue
            config = task.config
            kept = [each for each in zip(*columns, texts) if each[2] >= 0 and each[0] > -math.inf]
            if self._draws is not None or config.beam == 1:  # their penalty is divided in float64
                kept = [(b / length_penalty(step + 1, config), b, step, row, text) for _, b, step, row, text in kept]
            if self._draws is not None:
                kept.sort(key=lambda each: (-each[0], each[2], each[3]))
            if self._groups is None:
                kept = kept[: config.nbest]
            best = [Hypothesis(text[:step].tolist(), score, b) for score, b, step, _, text in kept]
            if self._groups is not None:
                best = distinct(best, config.nbest)
            yield task, best


@functools.lru_cache
def _penalties(config: DecodingConfig, steps: int) -> np.ndarray:
    """Length penalty (steps,) float32 of outputs that end at each position."""
    penalties = [length_penalty(position + 1, config) for position in range(steps)]
    return torch.tensor(penalties, dtype=torch.float32, device=_CPU).numpy()  # unlike numpy, overflows without warning


def _traced(tokens: np.ndarray, parents: np.ndarray, steps: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Output tokens (n, N, T) of rows (n, N) before steps (n, N), traced back through tokens and parents (n, T, K)."""
    outputs = np.zeros((*steps.shape, tokens.shape[1]), np.int64)
    sentences = np.arange(len(tokens))[:, None]
    for before in range(steps.max(initial=0) - 1, -1, -1):
        outputs[:, :, before] = tokens[sentences, before, rows]
        rows = np.where(before < steps, parents[sentences, before, rows], rows)
    return outputs
