"""The sentences that wait: taken in turns from the requests that they belong to, not by the time at which they came.

The request that has been given the least work comes first, so a request of one sentence does not wait for all sentences
of another. Work is counted in rows times steps: hypotheses of the beam times the tokens that an output is expected to
have. A new request starts level with the one that has been given the least. Source: start-time fair queueing, Goyal et
al. 1996.
"""

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from fasttfm.config.decoding import DecodingConfig
from fasttfm.search.phrases import Phrases
from fasttfm.translate.translator import Translation

_REQUESTS = itertools.count()


class Answer(Future[list[Translation]]):
    """The translations of a sentence, which a client may stop waiting for at any time."""

    abandoned = False
    """Whether nobody waits any more."""

    def __init__(self) -> None:
        super().__init__()
        self.on_abandon: Callable[[], object] | None = None
        """Called when nobody waits any more and the sentence is being translated."""

    def abandon(self) -> None:
        """Leave the sentence out, or out of what is left of its search."""
        self.abandoned = True
        if not self.cancel() and not self.done() and self.on_abandon is not None:
            self.on_abandon()


@dataclass(eq=False, slots=True)
class Sentence:
    """A sentence and who waits for it."""

    model: str
    config: DecodingConfig
    text: str
    tokens: int
    answer: Answer
    request: Hashable = None
    """Equal for the sentences that were asked for together."""
    prefix: str = ""
    """How the translation must begin."""
    number: int = 0
    """Its place in the request, which sampling draws by besides its seed."""
    required: Sequence[Phrases] = ()
    """Phrases that the translation must hold, as Terminology.required() gives them."""
    aligned: bool = False
    """Whether its translations have alignments."""
    request_work: int = 0
    """The work of all sentences of its request."""
    tries: int = 0
    """Times that a Pool has handed it out."""

    @property
    def work(self) -> int:
        """Rows times steps that its search is expected to take."""
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
    """The sentences of one request, with answers that will hold the translations of each text.

    tokens: source tokens of each; prefixes: how each translation must begin; required, aligned: as of Sentence.
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
    """Work that it has been given, beyond that of the request with the least when it came."""


class FairQueue:
    """Sentences that wait; not to be used by several threads at once."""

    def __init__(self) -> None:
        self._requests: dict[Hashable, _Request] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sentence]:
        return (sentence for request in self._requests.values() for sentence in request.waiting)

    def add(self, sentences: Iterable[Sentence]) -> None:
        """Append sentences behind the waiting ones of the same request."""
        for sentence in sentences:
            self._request(sentence).waiting.append(sentence)
            self._count += 1

    def put_back(self, sentence: Sentence) -> None:
        """The next one of its request; it has been taken before."""
        self._request(sentence).waiting.appendleft(sentence)
        self._count += 1

    def take(self, fits: Callable[[Sentence], bool]) -> Sentence | None:
        """The next sentence that fits, of the request that has been given the least; None where none of them does.

        Sentences of a request keep their order. Those that were abandoned are left out.
        """
        for request in sorted(self._requests.values(), key=lambda each: each.given):
            while request.waiting and request.waiting[0].answer.abandoned:
                self._pop(request)
            if request.waiting and fits(request.waiting[0]):
                sentence = self._pop(request)
                request.given += sentence.work
                return sentence
        return None

    def clear(self) -> list[Sentence]:
        """All that waited."""
        sentences = list(self)
        self._requests.clear()
        self._count = 0
        return sentences

    def _request(self, sentence: Sentence) -> _Request:
        if sentence.request not in self._requests:
            self._requests = {key: each for key, each in self._requests.items() if each.waiting}
            least = min((each.given for each in self._requests.values()), default=0)
            self._requests[sentence.request] = _Request(deque(), least)
        return self._requests[sentence.request]

    def _pop(self, request: _Request) -> Sentence:
        self._count -= 1
        return request.waiting.popleft()
