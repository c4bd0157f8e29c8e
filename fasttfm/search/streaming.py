"""Streaming: yields a translation token by token while the search runs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.data.unicode_forms import has_text
from fasttfm.search.batches import inference
from fasttfm.search.hypotheses import refuse_failed
from fasttfm.search.search import running_search
from fasttfm.search.tasks import Waiting


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
    """Yields the tokens that search_ids() finds with one hypothesis, as they are chosen; on a GPU a few at a time.

    source: ids with end-of-sentence. number: seed beside config.sampling_seed. banned, allowed: see search_ids().
    Between two tokens no PyTorch or model state is changed. Raises ValueError for a config with several hypotheses,
    UserError if the model's probabilities are NaN.
    """
    rows = config.nbest if config.sampling else config.beam
    if rows != 1 or config.mbr_samples:  # a coverage penalty does not choose among one
        raise ValueError("only one hypothesis can be streamed: set beam=1, or sampling=True with nbest=1")
    return _stream(model, Waiting(None, source, prefix, number, allowed), config, banned)


def _stream(model: Any, sentence: Waiting, config: DecodingConfig, banned: Sequence[Sequence[int]]) -> Iterator[int]:
    with inference(model, batch_invariant=config.batch_invariant):
        search = running_search(model, config)(model, config, banned=banned)
    search.waiting.append(sentence)
    sent = 0
    while not search.idle:
        with inference(model, batch_invariant=config.batch_invariant):
            finished, tokens = search.step(), search.written()
        for _, hypotheses in finished:
            refuse_failed(hypotheses)
            tokens = hypotheses[0].tokens
        yield from tokens[sent:]
        sent = max(sent, len(tokens))


def stream_text(ids: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields pieces of text that concatenate to the decoded line; none if it has no text (has_text()).

    Characters spelled in bytes, and what Moses' rules may still join, are held back until they are complete.
    """
    written: list[int] = []
    sent = text = ""
    for token in ids:
        written.append(token)
        text = " ".join(tokenizer.decode(written).splitlines())
        whole = " ".join(tokenizer.stable_prefix(written).splitlines())
        if len(whole) > len(sent) and (sent or has_text(whole)):
            yield whole[len(sent) :]
            sent = whole
    if text != sent and (sent or has_text(text)):
        yield text[len(sent) :]
