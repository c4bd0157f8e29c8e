"""From the texts of a request to lines that are translated each by itself, and back."""

from collections.abc import Callable, Sequence

from fasttfm.translate.alignment import WORDS
from fasttfm.translate.sentences import join_sentences, sentences_of
from fasttfm.translate.translator import Translation, one_line


class Text:
    """A text of a request: its lines are translated each by itself, or the sentences of its lines."""

    def __init__(self, text: str, split: Callable[[str], list[str]] | None = None) -> None:
        """Only a line feed ends a line. split: as of sentence_splitter(); None for whole lines."""
        self._whole = [one_line(line) for line in text.split("\n")]
        self._parts = [[line] if split is None else sentences_of(line, split) for line in self._whole]

    @property
    def lines(self) -> list[str]:
        """Return what is translated, in order."""
        return [part for parts in self._parts for part in parts]

    def put_together(self, translated: Sequence[list[Translation]]) -> list[Translation]:
        """Its translations, best first, from those of its lines: the n-th best of each, with their mean score; a line
        that has fewer, as an empty one has, gives its last. Of sentences the best one alone."""
        following = iter(translated)
        lines = [self._line(parts, [next(following) for _ in parts]) for parts in self._parts]
        ranks = range(max(map(len, lines)))
        return [self._joined([best[min(rank, len(best) - 1)] for best in lines]) for rank in ranks]

    def has_empty(self, translated: Sequence[list[Translation]], rank: int) -> bool:
        """Return whether a line or sentence that has words was translated to nothing, in the translation of a rank."""
        pairs = zip(self.lines, translated, strict=True)
        return any(line.strip() and not best[min(rank, len(best) - 1)].text.strip() for line, best in pairs)

    def _line(self, parts: Sequence[str], translated: Sequence[list[Translation]]) -> list[Translation]:
        if len(parts) == 1:
            return translated[0]
        return [join_sentences(parts, [best[0] for best in translated])]

    def _joined(self, chosen: Sequence[Translation]) -> Translation:
        if len(chosen) == 1:
            return chosen[0]
        links, sources, targets = [], 0, 0
        for line, each in zip(self._whole, chosen, strict=True):
            links += [(one + sources, other + targets) for one, other in each.alignment]
            sources += len(WORDS.findall(line))
            targets += len(WORDS.findall(each.text))
        score = sum(each.score for each in chosen) / len(chosen)
        probability = sum(each.log_probability for each in chosen)
        return Translation("\n".join(each.text for each in chosen), score, probability, tuple(links))
