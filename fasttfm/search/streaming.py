"""Streaming: a translation is given out token by token while it is searched."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.search.batches import inference
from fasttfm.search.beam import start_cache
from fasttfm.search.continuous import Waiting, constraints_of
from fasttfm.search.decoder import decoder_of
from fasttfm.search.device.search import DeviceSearch
from fasttfm.search.greedy import GreedySteps
from fasttfm.search.hypotheses import Hypothesis, refuse_failed
from fasttfm.search.search import running_search


def stream_ids(
    model: Any,
    source: Sequence[int],
    config: DecodingConfig,
    *,
    prefix: Sequence[int] = (),
    number: int = 0,
    banned: Sequence[Sequence[int]] = (),
    allowed: Sequence[int] | None = None,
) -> Iterator[int]:
    """The tokens of what search_ids finds with beam 1, or with sampling and nbest 1, as they are chosen; on a GPU a few
    at a time.

    source: ids with end-of-sentence; number: what sampling takes its random numbers from besides the seed; banned,
    allowed: as of search_ids, for this source. Between two tokens no mode of PyTorch or of the model is changed. Raises
    ValueError for a config that keeps several hypotheses, UserError for a model whose weights give no probabilities.
    """
    rows = config.nbest if config.sampling else config.beam
    if rows != 1 or config.mbr_samples or config.coverage_penalty:
        raise ValueError("only one hypothesis can be streamed: set beam=1, or sampling=True with nbest=1")
    return _stream(model, Waiting(None, source, prefix, number, allowed), config, banned)


def _stream(model: Any, sentence: Waiting, config: DecodingConfig, banned: Sequence[Sequence[int]]) -> Iterator[int]:
    with inference(model, batch_invariant=config.batch_invariant):
        on_device = running_search(model, config) is DeviceSearch
    return (_stream_on_device if on_device else _stream_stepwise)(model, sentence, config, banned)


def _stream_stepwise(
    model: Any, sentence: Waiting, config: DecodingConfig, banned: Sequence[Sequence[int]]
) -> Iterator[int]:
    with inference(model, batch_invariant=config.batch_invariant) as device:
        steps = GreedySteps(constraints_of(model, [sentence], config, device, banned), config, [sentence.number])
        cache = start_cache(model, [sentence.source], steps)
    while steps.sentences:
        with inference(model, batch_invariant=config.batch_invariant):
            steps.extend(decoder_of(model).step(steps.tokens, cache))
        refuse_failed(steps.best(0) or [Hypothesis([], score, score) for score in steps.scores.tolist()])
        if steps.sentences:
            yield int(steps.tokens)


def _stream_on_device(
    model: Any, sentence: Waiting, config: DecodingConfig, banned: Sequence[Sequence[int]]
) -> Iterator[int]:
    search, sent = DeviceSearch(model, config, banned=banned), 0
    search.waiting.append(sentence)
    while not search.idle:
        with inference(model, batch_invariant=config.batch_invariant):
            found, tokens = search.step(), search.written()
        for _, hypotheses in found:
            refuse_failed(hypotheses)
            tokens = hypotheses[0].tokens
        yield from tokens[sent:]
        sent = max(sent, len(tokens))


def stream_text(ids: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Pieces of text that together are the decoded ids as one line; a character in bytes, and what Moses' rules
    may still join, come when they are whole."""
    written: list[int] = []
    sent = text = ""
    for token in ids:
        written.append(token)
        text = " ".join(tokenizer.decode(written).splitlines())
        whole = " ".join(tokenizer.lasting(written).splitlines())
        if len(whole) > len(sent):
            yield whole[len(sent) :]
            sent = whole
    if text != sent:
        yield text[len(sent) :]
