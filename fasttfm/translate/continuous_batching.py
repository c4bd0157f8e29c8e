"""Continuous batching of text lines, for a server: lines join a running search at any step."""

from collections.abc import Collection, Hashable

from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError
from fasttfm.search.hypotheses import refuse_failed
from fasttfm.search.search import running_search, takes_sentences
from fasttfm.search.tasks import Waiting
from fasttfm.translate.translator import Translation, Translator

Result = tuple[Hashable, list[Translation] | UserError]
"""Key of a line, and its translations or the error."""


def takes_options(translator: Translator, config: DecodingConfig) -> bool:
    """Return whether lines with these options may join a running search; diverse beams, coverage, terminology and MBR
    need whole batches."""
    whole = config.mbr_samples or config.coverage_penalty or config.diverse_beam_groups > 1
    return not whole and config.batch_invariant and translator.terminology is None


def takes_lines(translator: Translator) -> bool:
    """Return whether the model supports joining: on a GPU, and on a CPU with numba. Call inside inference()."""
    return takes_sentences(translator.model, DecodingConfig())


class ContinuousBatching:
    """Translates lines that are added between steps, with the results of Translator.translate_nbest().

    Use inside inference(), if takes_lines(), with options that takes_options().
    """

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        search = running_search(translator.model, DecodingConfig())
        self.search = search(translator.model, translator.config, banned=translator.banned)
        self._new: list[Waiting] = []
        self._empty: list[Hashable] = []
        self._lines: dict[Hashable, tuple[str, list[int], bool, bool]] = {}
        """Key -> line, ids with end-of-sentence, whether to align, whether sampled."""

    def add(self, key: Hashable, line: str, config: DecodingConfig, prefix: str, number: int, aligned: bool) -> None:
        """Add a line to the next step.

        key: identifies its result. config: its options. prefix: required beginning. number: sampling seed beside
        config.sampling_seed. aligned: add alignments even if the translator does not.
        """
        source = self.translator.encode_lines([line], [number]).get(0)
        if source is None:
            self._empty.append(key)
            return
        shortlist = self.translator.shortlist
        allowed = None if shortlist is None else shortlist.tokens(source)
        beginning = self.translator.beginning(prefix)
        self._lines[key] = line, source, aligned or self.translator.aligned, config.sampling
        self._new.append(Waiting(key, source, beginning, number, allowed=allowed, config=config))

    def drop(self, keys: Collection[Hashable]) -> None:
        """Cancel lines; they leave at the next step without a result."""
        self._new = [each for each in self._new if each.key not in keys]
        self._empty = [key for key in self._empty if key not in keys]
        self.search.drop(keys)
        for key in keys:
            self._lines.pop(key, None)

    def step(self) -> list[Result]:
        """Take a step, and return the results of the lines that finished."""
        results: list[Result] = [(key, [Translation("", 0.0, 0.0)]) for key in self._empty]
        self._empty = []
        new, self._new = self._new, []
        for key, error in self.search.join(new):
            self._lines.pop(key)
            results.append((key, error))
        for key, hypotheses in self.search.step():
            line, source, aligned, sampled = self._lines.pop(key)
            try:
                refuse_failed(hypotheses)
                translations, tokens = self.translator.translations(hypotheses, distinct=not sampled)
                if aligned:
                    self.translator.align([line], {0: source}, {0: tokens}, [translations])
            except UserError as error:
                results.append((key, error))
            else:
                results.append((key, translations))
        return results
