"""Search over a list of sources: batches sentences of similar length, picks the search, restores the input order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.cpu.linear import never_changes
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
    """Best target ids for each source, in order, without begin- and end-of-sentence.

    sources: ids with end-of-sentence. max_tokens: padded source tokens per batch; None: config.batch_tokens. The
    model's training mode is restored.
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
    """The config.nbest best hypotheses of each source (ids with end-of-sentence), in order.

    prefixes: ids that each output must begin with (may be empty). numbers: seed of each source for sampling, beside
    config.sampling_seed; None: its index. banned: token sequences that no output contains, unless a prefix or a
    required phrase forces them. required: phrases that each output must contain, each a list of alternative token
    sequences; they override length limits. continuations: tokens that continue a word; a required phrase followed by
    one does not count. allowed: the only tokens of each output besides end-of-sentence and forced ones; the probability
    is renormalized over them. workers: search_workers() of this model, to search batches in parallel, one core each.
    Raises ValueError for a source without tokens, an empty sequence, or required phrases without beam search; UserError
    if the model's probabilities are NaN.
    """
    _check(
        sources, {"prefixes": prefixes, "numbers": numbers, "required": required, "allowed": allowed}, banned, config
    )
    nbest, reranks = config.nbest, config.coverage_penalty and not config.sampling
    if reranks:
        config = replace(config, nbest=config.beam)
    batched = config if max_tokens is None else replace(config, batch_tokens=max_tokens)
    options = zip(
        sources, prefixes or repeat(()), numbers or range(len(sources)), allowed or repeat(None), required or repeat(())
    )
    sentences = [Waiting(index, *each) for index, each in enumerate(options)]
    outputs: list[list[Hypothesis]] = [[] for _ in sources]
    parallel = 1 if workers is None else workers.count
    single_thread = workers is not None  # also if there is too little work to start them
    if workers is not None and not workers.pids:
        work = config.beam * sum(map(len, sources)) * sum(map(Tensor.numel, model.parameters()))
        workers = workers if work >= workers.least_work else None
    device = next(model.parameters()).device
    with_phrases = [each for each in sentences if each.required]  # these need a search of their own
    batches = [
        batch
        for group in ([each for each in sentences if not each.required], with_phrases)
        for batch in _batches(group, batched, device, parallel)
    ]
    calls = [(part, batched, banned, continuations, parallel) for part in _parts(batches, parallel)]
    for index, hypotheses in _run(model, calls, workers, single_thread=single_thread):
        refuse_failed(hypotheses)
        outputs[index] = hypotheses
    if reranks:
        outputs = [best[:nbest] for best in rescore_by_coverage(model, sources, outputs, batched)]
    return outputs


def _check(
    sources: Sequence[Sequence[int]],
    per_source: dict[str, Sequence[Any] | None],
    banned: Sequence[Sequence[int]],
    config: DecodingConfig,
) -> None:
    """Raise ValueError for inconsistent arguments of search_ids(). per_source: those with one entry per source."""
    for number, source in enumerate(sources):
        if not len(source):
            raise ValueError(f"source {number} has no tokens: it must at least hold end-of-sentence")
    for name, values in per_source.items():
        if values is not None and len(values) != len(sources):
            raise ValueError(f"{len(values)} {name} for {len(sources)} sources: give one for each")
    if not all(banned):
        raise ValueError("a banned sequence has no tokens: give at least one")
    if any(per_source["required"] or ()) and (config.sampling or config.diverse_beam_groups > 1):
        raise ValueError("required phrases need a beam search: leave out sampling, mbr_samples and diverse_beam_groups")


def search_workers(model: Any, count: int, *, least_work: float = 0) -> WorkerPool | None:
    """Worker processes for search_ids(); None if count is 1, the model is not on a CPU, or fork is unavailable.

    least_work: source tokens times parameters times beam below which they are not started.
    """
    if count == 1 or not can_fork(model):
        return None
    remedy = "run the same command again, with a smaller --batch-tokens or --workers if memory did not suffice"
    return WorkerPool(model, count, remedy=remedy, prepare=prepare, least_work=least_work)


def prepare(model: Transformer) -> None:
    """Fill the caches shared by all searches (packed weights, order of sums) before workers are forked."""
    with suppress(UserError):  # the first search reports it
        search_ids(model, [[EOS]], DecodingConfig(beam=2, max_len_a=0.0, max_len_b=1))
    never_changes(model)


def _batches(
    sentences: list[Waiting], config: DecodingConfig, device: torch.device, workers: int
) -> Iterator[list[Waiting]]:
    """Batches of sentences of similar length, at least one per worker if there are enough sentences."""
    alike = LENGTHS if config.batch_invariant and device.type == "cpu" else None
    lengths, max_tokens = [len(each.source) for each in sentences], config.batch_tokens
    if workers > 1:
        total = sum(max(round_length(length, alike or 1), SHORTEST) for length in lengths)
        max_tokens = min(max_tokens, -(-total // workers))
    for batch in length_batches(lengths, max_tokens, SHORTEST, alike=alike):
        yield [sentences[index] for index in batch]


def running_search(model: Transformer, config: DecodingConfig) -> type[RunningSearch | DeviceSearch]:
    """The search class for this model and configuration. Call inside inference()."""
    return DeviceSearch if device_takes(model, config) else RunningSearch


def takes_sentences(model: Transformer, config: DecodingConfig) -> bool:
    """Return whether sentences may join a search that is already running. Call inside inference()."""
    return running_search(model, config) is DeviceSearch or can_continue(model)


def _parts(batches: list[list[Waiting]], workers: int) -> Iterator[list[list[Waiting]]]:
    """Batches per worker call: many at first, few at the end, so that all workers finish at about the same time."""
    begin = 0
    while begin < len(batches):
        count = len(batches) if workers == 1 else -(-(len(batches) - begin) // (2 * workers))
        yield batches[begin : begin + count]
        begin += count


def _run(
    model: Transformer, calls: Sequence[tuple], workers: WorkerPool | None, *, single_thread: bool
) -> list[tuple[int, list[Hypothesis]]]:
    """(index, hypotheses) of each sentence; several calls are distributed over the workers."""
    if workers is not None and len(calls) > 1:
        return [each for _, results in workers.each(_search_batches, calls) for each in results]
    threads = torch.get_num_threads()
    try:
        if single_thread:
            torch.set_num_threads(1)  # like a worker: threads that synchronize are slow on busy cores
        with inference(model):
            return [each for call in calls for each in _search_batches(model, *call)]
    finally:
        torch.set_num_threads(threads)


def _search_batches(
    model: Transformer,
    batches: list[list[Waiting]],
    config: DecodingConfig,
    banned: Sequence[Sequence[int]],
    continuations: frozenset[int],
    parallel: int,
) -> list[tuple[Any, list[Hypothesis]]]:
    """(key, hypotheses) of each sentence, from one search that all sentences join, or batch by batch.

    Sentences with required phrases are searched on the host. parallel: calls that run at the same time.
    """
    host = partial(RunningSearch, model, config, banned=banned, continuations=continuations, at_once=parallel)
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
