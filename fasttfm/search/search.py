"""From source ids to hypotheses: batches of similar length, the search that the configuration asks for, input order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.shapes import length_batches, round_length
from fasttfm.data.tokenizer import EOS
from fasttfm.errors import UserError
from fasttfm.search.batches import LENGTHS, SHORTEST, inference
from fasttfm.search.continuous import RunningSearch, can_continue
from fasttfm.search.coverage import rescore_by_coverage
from fasttfm.search.device.search import DeviceSearch
from fasttfm.search.device.search import takes as device_takes
from fasttfm.search.hypotheses import Hypothesis, refuse_failed
from fasttfm.search.phrases import Phrases
from fasttfm.search.tasks import Waiting
from fasttfm.system.processes import WorkerPool, can_fork

if TYPE_CHECKING:
    from fasttfm.models import Transformer


def translate_ids(
    model: Transformer, sources: Sequence[Sequence[int]], config: DecodingConfig, max_tokens: int | None = None
) -> list[list[int]]:
    """The best target ids, without begin- and end-of-sentence, of each source (ids with end-of-sentence), in order.

    max_tokens: padded source tokens of a batch, config.batch_tokens when None. The model's training mode is put back.
    """
    return [hypotheses[0].tokens for hypotheses in search_ids(model, sources, config, max_tokens=max_tokens)]


def search_ids(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    config: DecodingConfig,
    *,
    max_tokens: int | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    numbers: Sequence[int] | None = None,
    banned: Sequence[Sequence[int]] = (),
    required: Sequence[Sequence[Phrases]] | None = None,
    continuations: frozenset[int] = frozenset(),
    allowed: Sequence[Sequence[int]] | None = None,
    workers: WorkerPool | None = None,
) -> list[list[Hypothesis]]:
    """The config.nbest best hypotheses of each source (ids with end-of-sentence), in the order of the sources.

    prefixes: for each source, the ids its output must begin with (may be empty). numbers: for each source, what
    sampling takes its random numbers from besides the seed; its index in sources when None. banned: sequences of ids
    that no output holds, unless a prefix or a required phrase forces them. required: for each source, what its output
    must hold, each a list of alternatives, which are sequences of ids; limits of length give way. continuations: ids
    that go on a word, so that a required phrase before one does not count. allowed: for each source, the only ids that
    its output holds besides end-of-sentence and what is forced; they share all of the probability. workers:
    search_workers() of this model, which search batches at once, each on a core of its own. Raises ValueError for a
    source without tokens, an empty sequence, and required phrases without a beam search, UserError for a model whose
    weights give no probabilities.
    """
    _check(
        sources, {"prefixes": prefixes, "numbers": numbers, "required": required, "allowed": allowed}, banned, config
    )
    wanted = config.nbest
    if config.coverage_penalty and not config.sampling:
        config = replace(config, nbest=config.beam)
    outputs: list[list[Hypothesis]] = [[] for _ in sources]
    with inference(model) as device:
        count = 1 if workers is None else workers.count
        lengths = [*map(len, sources)]
        single_thread = workers is not None  # also where the work is not worth starting them
        if workers is not None and not workers.pids:
            work = config.beam * sum(lengths) * sum(map(Tensor.numel, model.parameters()))
            workers = workers if work >= workers.least_work else None
        batches = [
            [indices[number] for number in batch]
            for indices in _with_and_without_phrases(len(sources), required)
            for batch in _batches(
                [lengths[index] for index in indices], max_tokens or config.batch_tokens, config, device, count
            )
        ]
        shared = _Shared(
            config if max_tokens is None else replace(config, batch_tokens=max_tokens), banned, continuations, count
        )

        def sentence(index: int) -> Waiting:
            return Waiting(
                index,
                sources[index],
                () if prefixes is None else prefixes[index],
                index if numbers is None else numbers[index],
                None if allowed is None else allowed[index],
                () if required is None else required[index],
            )

        calls = [([[*map(sentence, batch)] for batch in some], shared) for some in _parts(batches, count)]
        for index, hypotheses in _each(model, calls, workers, single_thread=single_thread):
            refuse_failed(hypotheses)
            outputs[index] = hypotheses
    if config.coverage_penalty:
        outputs = [best[:wanted] for best in rescore_by_coverage(model, sources, outputs, config)]
    return outputs


def _check(
    sources: Sequence[Sequence[int]],
    lists: dict[str, Sequence[Any] | None],
    banned: Sequence[Sequence[int]],
    config: DecodingConfig,
) -> None:
    """Raises ValueError for arguments of search_ids() that do not agree; lists: those with an entry a source."""
    for number, source in enumerate(sources):
        if not len(source):
            raise ValueError(f"source {number} has no tokens: it must at least hold end-of-sentence")
    for what, given in lists.items():
        if given is not None and len(given) != len(sources):
            raise ValueError(f"{len(given)} {what} for {len(sources)} sources: give one for each")
    if not all(banned):
        raise ValueError("a banned sequence has no tokens: give at least one")
    if any(lists["required"] or ()) and (config.sampling or config.diverse_beam_groups > 1):
        raise ValueError("required phrases need a beam search: leave out sampling, mbr_samples and diverse_beam_groups")


def search_workers(model: Any, count: int, *, least_work: float = 0) -> WorkerPool | None:
    """So many processes for search_ids(); None for one, for a model that is not on a CPU and where nothing can fork.

    least_work: source tokens times parameters times beam that they are started for.
    """
    if count == 1 or not can_fork(model):
        return None
    remedy = "run the same command again, with a smaller --batch-tokens or --workers if memory did not suffice"
    return WorkerPool(model, count, remedy=remedy, prepare=prepare, least_work=least_work)


def prepare(model: Transformer) -> None:
    """Makes, before workers part, what all searches keep: weights laid out for products, and how these sum."""
    with suppress(UserError):  # which the first search tells
        search_ids(model, [[EOS]], DecodingConfig(beam=2, max_len_a=0.0, max_len_b=1))


def _with_and_without_phrases(count: int, required: Sequence[Sequence[Phrases]] | None) -> list[list[int]]:
    """Indices of sources that are searched alike: what nothing is required of takes the common search."""
    if required is None:
        return [list(range(count))]
    return [[index for index in range(count) if bool(required[index]) == any_phrase] for any_phrase in (False, True)]


def _batches(
    lengths: list[int], max_tokens: int, config: DecodingConfig, device: torch.device, workers: int
) -> list[list[int]]:
    """Indices of sentences of similar length, at least a batch a worker where there are as many."""
    alike = LENGTHS if config.batch_invariant and device.type == "cpu" else None
    if workers > 1:
        total = sum(max(round_length(length, alike or 1), SHORTEST) for length in lengths)
        max_tokens = min(max_tokens, -(-total // workers))
    return length_batches(lengths, max_tokens, SHORTEST, alike=alike)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Objects that all sentences of a call are searched with; see search_ids."""

    config: DecodingConfig
    banned: Sequence[Sequence[int]]
    continuations: frozenset[int]
    workers: int
    """How many calls are computed at once."""


def running_search(model: Transformer, config: DecodingConfig) -> type[RunningSearch | DeviceSearch]:
    """The class of searches for this model and configuration; asked inside inference()."""
    return DeviceSearch if device_takes(model, config) else RunningSearch


def takes_sentences(model: Transformer, config: DecodingConfig) -> bool:
    """Return whether sentences may join such a search while it runs; asked inside inference()."""
    return running_search(model, config) is DeviceSearch or can_continue(model)


def _parts(batches: list[list[int]], workers: int) -> Iterator[list[list[int]]]:
    """Batches that a worker takes at once: many at first, few in the end, so that all workers end at about one time."""
    begin = 0
    while begin < len(batches):
        count = len(batches) if workers == 1 else -(-(len(batches) - begin) // (2 * workers))
        yield batches[begin : begin + count]
        begin += count


def _each(
    model: Transformer, calls: Sequence[tuple], workers: WorkerPool | None, *, single_thread: bool
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """(index, hypotheses) of each sentence of each call, by the workers where there are more calls than one."""
    if workers is not None and len(calls) > 1:
        for _, results in workers.each(_search_batches, calls):
            yield from results
        return
    threads = torch.get_num_threads()
    try:
        if single_thread:
            torch.set_num_threads(1)  # as a worker: threads that wait for one another are slow where others work
        for call in calls:
            yield from _search_batches(model, *call)
    finally:
        torch.set_num_threads(threads)


def _search_batches(
    model: Transformer, batches: list[list[Waiting]], shared: _Shared
) -> list[tuple[Any, list[Hypothesis]]]:
    """(key, hypotheses) of each sentence: one search that all of them join, or batch by batch.

    Required phrases are searched on the host.
    """
    config, banned = shared.config, shared.banned
    host = partial(
        RunningSearch, model, config, banned=banned, continuations=shared.continuations, at_once=shared.workers
    )
    results: list[tuple[Any, list[Hypothesis]]] = []
    with inference(model, batch_invariant=config.batch_invariant):
        on_device = running_search(model, config) is DeviceSearch
        running = DeviceSearch(model, config, banned=banned) if on_device else host()
        for batch in batches:
            if on_device and batch[0].required:
                results += host().search(batch)
            elif isinstance(running, DeviceSearch) or running.continues:
                running.waiting += batch
            else:
                results += running.search(batch)
        results += running.run()
    return results
