"""From source ids to hypotheses: batches of similar length, the search that the configuration asks for, input order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.shapes import length_batches, round_length
from fasttfm.decoding.batches import LENGTHS, SHORTEST, inference, padded
from fasttfm.decoding.beam import beam_search
from fasttfm.decoding.hypotheses import NOT_A_NUMBER, Constraints, Hypothesis
from fasttfm.decoding.memory import refuse_more_than_available, search_bytes
from fasttfm.decoding.stepwise import greedy_search, sample
from fasttfm.errors import UserError

if TYPE_CHECKING:
    from fasttfm.models import Transformer


def translate_ids(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    config: DecodingConfig,
    max_tokens: int | None = None,
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
    workers: int = 1,
) -> list[list[Hypothesis]]:
    """The config.nbest best hypotheses of each source (ids with end-of-sentence), in the order of the sources.

    prefixes: for each source, the ids its output must begin with (may be empty). numbers: for each source, what
    sampling takes its random numbers from besides the seed; its place in sources when None. banned: sequences of ids
    that no output holds, unless a prefix forces them. workers: batches searched at once on a CPU, each by one thread of
    its own with the one copy of the weights; threads that share a batch wait for one another at each of its thousands
    of operators. Raises ValueError for a source without tokens or an empty banned sequence, UserError for a model whose
    weights give no probabilities.
    """
    for place, source in enumerate(sources):
        if not len(source):
            raise ValueError(f"source {place} has no tokens: it must at least hold end-of-sentence")
    for what, given in (("prefixes", prefixes), ("numbers", numbers)):
        if given is not None and len(given) != len(sources):
            raise ValueError(f"{len(given)} {what} for {len(sources)} sources: give one for each")
    if not all(banned):
        raise ValueError("a banned sequence has no tokens: give at least one")
    outputs: list[list[Hypothesis]] = [[] for _ in sources]
    with inference(model) as device:
        workers = workers if device.type == "cpu" else 1
        batches = _batches([*map(len, sources)], max_tokens or config.batch_tokens, config, device, workers)

        def search(batch: list[int]) -> list[list[Hypothesis]]:
            with inference(model, batch_invariant=config.batch_invariant):  # a thread's own
                return _search_batch(
                    model,
                    [sources[place] for place in batch],
                    None if prefixes is None else [list(prefixes[place]) for place in batch],
                    batch if numbers is None else [numbers[place] for place in batch],
                    banned,
                    config,
                    device,
                    workers,
                )

        for batch, results in zip(batches, _each(batches, search, workers)):
            for place, hypotheses in zip(batch, results):
                if not hypotheses or math.isnan(hypotheses[0].log_probability):
                    raise UserError(NOT_A_NUMBER)
                outputs[place] = hypotheses
    return outputs


def _batches(
    lengths: list[int], max_tokens: int, config: DecodingConfig, device: torch.device, workers: int
) -> list[list[int]]:
    """Places of sentences of similar length, at least a batch a worker where there are as many."""
    alike = LENGTHS if config.batch_invariant and device.type == "cpu" else None
    if workers > 1:
        total = sum(max(round_length(length, alike or 1), SHORTEST) for length in lengths)
        max_tokens = min(max_tokens, -(-total // workers))
    return length_batches(lengths, max_tokens, SHORTEST, alike=alike)


def _each(
    batches: list[list[int]], search: Callable[[list[int]], list[list[Hypothesis]]], workers: int
) -> Iterator[list[list[Hypothesis]]]:
    """search(batch) of each batch in order, by so many threads."""
    if workers == 1 or not batches:
        yield from map(search, batches)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(workers, "search", torch.set_num_threads, (1,))
    try:
        yield from pool.map(search, batches)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _search_batch(
    model: Transformer,
    sources: list[Sequence[int]],
    prefixes: list[list[int]] | None,
    numbers: Sequence[int],
    banned: Sequence[Sequence[int]],
    config: DecodingConfig,
    device: torch.device,
    workers: int,
) -> list[list[Hypothesis]]:
    limits = [config.longest_output(len(source) - 1) for source in sources]
    if prefixes is not None:
        limits = [max(limit, len(prefix)) for limit, prefix in zip(limits, prefixes)]
    element_bytes = next(model.parameters()).element_size()
    needed = search_bytes(model.config, config, len(sources), max(map(len, sources)), element_bytes)
    refuse_more_than_available(workers * needed, workers * len(sources), config, device)
    constraints = Constraints(limits, prefixes, config, device, banned)
    source, source_lengths = padded(sources, device, LENGTHS if config.batch_invariant else 1)
    # Without padding attention needs no mask, in the encoder and at every step. It sums in another order with one.
    lengths: Tensor | None = source_lengths
    if not config.batch_invariant and all(len(each) == source.shape[1] for each in sources):
        lengths = None
    if config.sampling:
        return sample(model, source, lengths, limits, constraints, config, numbers)
    search = greedy_search if config.beam == 1 else beam_search
    return search(model, source, lengths, limits, constraints, config)
