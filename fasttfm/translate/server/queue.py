"""Fair queue of waiting sentences: requests take turns by work instead of arrival time.

The request that has received the least work comes first, so a request of one sentence does not wait for all sentences
of another. Work is rows times steps: hypotheses of the beam times expected output tokens. A new request starts level
with the one that has received the least. Source: start-time fair queueing, Goyal et al. 1996.
"""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from fasttfm.config.decoding import DecodingConfig
from fasttfm.search.phrases import Phrases
from fasttfm.translate.translator import Translation

_REQUESTS = itertools.count()


class QueueFull(Exception):
    """Too many sentences are waiting."""


class Answer(Future[list[Translation]]):
    """Future of the translations of a sentence, which a client may abandon at any time."""

    abandoned = False
    """Whether the client has stopped waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.on_abandon: Callable[[], object] | None = None
        """Called by abandon() while the sentence is being translated."""

    def abandon(self) -> None:
        """Cancel the sentence, or what is left of its search."""
        self.abandoned = True
        if not self.cancel() and not self.done() and self.on_abandon is not None:
            self.on_abandon()


@dataclass(eq=False, slots=True)
class Sentence:
    """A sentence of a request, and the future of its result."""

    model: str
    config: DecodingConfig
    text: str
    tokens: int
    answer: Answer
    request: Hashable = None
    """Key shared by the sentences of a request."""
    prefix: str = ""
    """Required beginning of the translation."""
    number: int = 0
    """Index in the request, the sampling seed beside config.sampling_seed."""
    required: Sequence[Phrases] = ()
    """Phrases that the translation must contain, from Terminology.required()."""
    aligned: bool = False
    """Whether to add alignments."""
    request_work: int = 0
    """Total work of the request."""
    tries: int = 0
    """Number of times that a Pool has assigned it to a worker."""

    @property
    def work(self) -> int:
        """Expected rows times steps of the search."""
        rows = self.config.nbest if self.config.sampling else self.config.beam
        phrases = sum(max(map(len, each)) for each in self.required)
        steps = min(self.tokens, self.config.longest_output(self.tokens))
        return rows * max(1, self.config.min_len, steps + phrases)


def sentences_of(
    model: str,
    config: DecodingConfig,
    texts: Sequence[str],
    tokens: Sequence[int],
    prefixes: Sequence[str] | None = None,
    required: Sequence[Sequence[Phrases]] | None = None,
    aligned: bool = False,
) -> list[Sentence]:
    """The sentences of one request, each with an Answer.

    tokens: source tokens of each text. prefixes: required beginnings. required, aligned: see Sentence.
    """
    request = next(_REQUESTS)
    lines = zip(texts, tokens, prefixes or [""] * len(texts), required or [()] * len(texts), strict=True)
    sentences = [
        Sentence(model, config, text, size, Answer(), request, prefix, number, phrases, aligned)
        for number, (text, size, prefix, phrases) in enumerate(lines)
    ]
    work = sum(each.work for each in sentences)
    for each in sentences:
        each.request_work = work
    return sentences


@dataclass(slots=True)
class _Request:
    waiting: deque[Sentence]
    given: int
    """Work received, plus what the request with the least had received when this one arrived."""


class FairQueue:
    """Queue of waiting sentences; not thread-safe."""

    def __init__(self, limit: int = sys.maxsize) -> None:
        """limit: most sentences that may wait."""
        self._limit = limit
        self._requests: dict[Hashable, _Request] = {}

    def __len__(self) -> int:
        return sum(len(request.waiting) for request in self._requests.values())

    def add(self, sentences: Sequence[Sentence]) -> None:
        """Append sentences to those of the same request. Raises QueueFull beyond the limit."""
        if len(self) + len(sentences) > self._limit:
            raise QueueFull
        for sentence in sentences:
            self._request(sentence).waiting.append(sentence)

    def put_back(self, sentence: Sentence) -> None:
        """Return a sentence that was taken to the front of its request."""
        self._request(sentence).waiting.appendleft(sentence)

    def take(self, fits: Callable[[Sentence], bool]) -> Sentence | None:
        """Take the next sentence that fits, from the request that has received the least work; None if none fits.

        Sentences of a request keep their order. Abandoned ones are dropped.
        """
        for request in sorted(self._requests.values(), key=lambda each: each.given):
            while request.waiting and request.waiting[0].answer.abandoned:
                request.waiting.popleft()
            if request.waiting and fits(request.waiting[0]):
                sentence = request.waiting.popleft()
                request.given += sentence.work
                return sentence
        return None

    def clear(self) -> list[Sentence]:
        """Remove and return all sentences."""
        sentences = [sentence for request in self._requests.values() for sentence in request.waiting]
        self._requests.clear()
        return sentences

    def _request(self, sentence: Sentence) -> _Request:
        if sentence.request not in self._requests:
            self._requests = {key: each for key, each in self._requests.items() if each.waiting}
            least = min((each.given for each in self._requests.values()), default=0)
            self._requests[sentence.request] = _Request(deque(), least)
        return self._requests[sentence.request]
