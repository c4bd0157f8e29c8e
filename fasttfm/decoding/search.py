"""From source ids to hypotheses: batches of similar length, the search that the configuration asks for, input order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from fasttfm.decoding.beam import beam_search
from fasttfm.decoding.config import DecodingConfig
from fasttfm.decoding.hypotheses import PAD, Constraints, Hypothesis
from fasttfm.decoding.stepwise import greedy_search, sample

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
    first_number: int = 0,
) -> list[list[Hypothesis]]:
    """The config.nbest best hypotheses of each source (ids with end-of-sentence), in the order of the sources.

    prefixes: for each source, the ids its output must begin with (may be empty). first_number: the number of sources[0]
    in the whole input, from which sampling takes its random numbers. Raises ValueError for a source without tokens.
    """
    for number, source in enumerate(sources):
        if not len(source):
            raise ValueError(f"source {number} has no tokens: it must at least hold end-of-sentence")
    if prefixes is not None and len(prefixes) != len(sources):
        raise ValueError(f"{len(prefixes)} prefixes for {len(sources)} sources: give one for each, [] for none")
    found: list[list[Hypothesis]] = [[] for _ in sources]
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in _batches([len(source) for source in sources], max_tokens or config.batch_tokens):
                results = _search_batch(
                    model,
                    [sources[place] for place in batch],
                    None if prefixes is None else [list(prefixes[place]) for place in batch],
                    [first_number + place for place in batch],
                    config,
                )
                for place, hypotheses in zip(batch, results):
                    found[place] = hypotheses
    finally:
        model.train(training)
    return found


def _batches(lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Places of sources of similar length, longest first so that memory runs out at once or not at all.

    A batch is as large as max_tokens allows with padding; a source longer than that is a batch of its own.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _search_batch(
    model: Transformer,
    sources: list[Sequence[int]],
    prefixes: list[list[int]] | None,
    numbers: list[int],
    config: DecodingConfig,
) -> list[list[Hypothesis]]:
    device = next(model.parameters()).device
    lengths = [len(source) for source in sources]
    source = torch.full((len(sources), max(lengths)), PAD)
    for row, ids in enumerate(sources):
        source[row, : len(ids)] = torch.as_tensor(ids)
    limits = [config.longest_output(length - 1) for length in lengths]
    if prefixes is not None:
        limits = [max(limit, len(prefix)) for limit, prefix in zip(limits, prefixes)]
    constraints = Constraints(limits, prefixes, config, device)
    source, source_lengths = source.to(device), torch.tensor(lengths, device=device)
    if config.sampling:
        return sample(model, source, source_lengths, limits, constraints, config, numbers)
    search = greedy_search if config.beam == 1 else beam_search
    return search(model, source, source_lengths, limits, constraints, config)
