"""Splits the texts of a request into lines or sentences, and joins their translations."""

from collections.abc import Callable, Sequence

from fasttfm.data.unicode_forms import has_text
from fasttfm.translate.sentences import join_sentences, sentences_of
from fasttfm.translate.translator import Translation, one_line


class Text:
    """A text of a request, translated line by line or sentence by sentence."""

    def __init__(self, text: str, split: Callable[[str], list[str]] | None = None) -> None:
        """Lines end at line feeds only. split: a sentence_splitter(); None: whole lines."""
        lines = [one_line(line) for line in text.split("\n")]
        self._sources = [f"{line}\n" for line in lines]
        self._parts = [[line] if split is None else sentences_of(line, split) for line in lines]

    @property
    def lines(self) -> list[str]:
        """The parts to translate, in order."""
        return [part for parts in self._parts for part in parts]

    def put_together(self, translated: Sequence[list[Translation]]) -> list[Translation]:
        """The translations of the text, best first, from those of its parts: the n-th best of each line, with their
        mean score; a line with fewer (an empty one) repeats its last. Sentences contribute their best only."""
        following = iter(translated)
        lines = [self._line(parts, [next(following) for _ in parts]) for parts in self._parts]
        ranks = range(max(map(len, lines)))
        chosen = ([best[min(rank, len(best) - 1)] for best in lines] for rank in ranks)
        return [join_sentences(self._sources, each, "\n") for each in chosen]

    def has_empty(self, translated: Sequence[list[Translation]], rank: int) -> bool:
        """Return whether a non-blank line or sentence has an empty translation at this rank."""
        pairs = zip(self.lines, translated, strict=True)
        return any(has_text(line) and not best[min(rank, len(best) - 1)].text.strip() for line, best in pairs)

    def _line(self, parts: Sequence[str], translated: Sequence[list[Translation]]) -> list[Translation]:
        if len(parts) == 1:
            return translated[0]
        return [join_sentences(parts, [best[0] for best in translated])]
