"""Lines of several sentences: each sentence is translated by itself, and the line is put together again."""

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from fasttfm.data.unicode_forms import has_text
from fasttfm.errors import UserError, optional
from fasttfm.translate.alignment import WORDS
from fasttfm.translate.translator import Translation, Translator

_NO_SPACE_AFTER = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]$")
"""A line that ends in Chinese or Japanese signs goes on without a space."""


_CODES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es
et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj
kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv
ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw ta te tg th
ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
LANGUAGES = frozenset(_CODES.split())
"""ISO 639-1. Of a code that it does not know sentencex takes the rules of English without a word."""


def sentence_splitter(language: str, option: str = "--split-sentences") -> Callable[[str], list[str]]:
    """Return a function that splits a line into its sentences, white space included: joined they are the line.

    By sentencex (MIT licence, of Wikimedia), which knows the abbreviations of some 240 languages; of others it takes a
    relative or splits at full stops. language: a code such as en or de; option: how the user has given it. UserError
    for one that is not a code, and where sentencex is not installed.
    """
    if not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]+)*", language, re.IGNORECASE):
        raise UserError(f"{option} {language!r}: give the language of the input, such as en or de")
    code = language.lower().partition("-")[0]
    if len(code) == 2 and code not in LANGUAGES:
        raise UserError(f"{option} {language!r}: is not a language of ISO 639-1: give one such as en or de")
    segment = optional("sentencex", "sentences").segment
    return lambda line: list(segment(language, line))


def sentences_of(line: str, split: Callable[[str], list[str]]) -> list[str]:
    """The sentences of a line that have any text; at least one."""
    return [part for part in split(line) if has_text(part)] or [line]


def translate_sentences(
    translator: Translator, lines: Iterable[str], split: Callable[[str], list[str]]
) -> Iterator[list[Translation]]:
    """Translate each line sentence by sentence, as Translator.translate_stream() does, with one translation a line.

    Log-probabilities are summed, scores averaged, alignments those of the line. Tallies of the translator count
    sentences and name lines.
    """
    waiting: deque[list[str]] = deque()  # the sentences of lines that are not translated yet
    first_sentences: list[int] = []  # of each line, counted from 1
    count = 0

    def sentences() -> Iterator[str]:
        nonlocal count
        for line in lines:
            parts = sentences_of(line, split)
            waiting.append(parts)
            first_sentences.append(count + 1)
            count += len(parts)
            yield from parts

    translated: list[Translation] = []
    for best, *_ in translator.translate_stream(sentences()):
        translated.append(best)
        if len(translated) == len(waiting[0]):
            yield [join_sentences(waiting.popleft(), translated)]
            translated = []
    for tally in (translator.cut, translator.long, translator.empty, translator.decomposed):
        if tally.first is not None:
            tally.first = bisect_right(first_sentences, tally.first)


def join_sentences(sentences: Sequence[str], translations: Sequence[Translation]) -> Translation:
    """The translation of a line, from those of its sentences."""
    whole, source = translations[0], sentences[0]
    for sentence, each in zip(sentences[1:], translations[1:]):
        text, links = _put_together(whole.text, each.text)
        source_words = len(WORDS.findall(source)) - _same_word(source, sentence)
        alignment = (*whole.alignment, *((one + source_words, other + links) for one, other in each.alignment))
        probability = whole.log_probability + each.log_probability
        whole = replace(whole, text=text, log_probability=probability, alignment=alignment)
        source += sentence
    return replace(whole, score=sum(each.score for each in translations) / len(translations))


def _put_together(before: str, after: str) -> tuple[str, int]:
    """The text of both, and the number of the word that the second begins with."""
    space = " " if before and after and not _NO_SPACE_AFTER.search(before) else ""
    return before + space + after, len(WORDS.findall(before)) - _same_word(before + space, after)


def _same_word(before: str, after: str) -> bool:
    """Return whether the last word of the one goes on with the other."""
    return bool(before and after) and not before[-1].isspace() and not after[0].isspace()
