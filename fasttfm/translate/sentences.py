"""Sentence splitting: translates each sentence of a line by itself and joins the translations."""

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from fasttfm.data.unicode_forms import has_text
from fasttfm.errors import UserError, optional
from fasttfm.translate.alignment import WORDS
from fasttfm.translate.translator import Translation, Translator

_NO_SPACE_AFTER = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]$")
"""Line endings in Chinese or Japanese, after which no space is inserted."""


_CODES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es
et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj
kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv
ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw ta te tg th
ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
LANGUAGES = frozenset(_CODES.split())
"""ISO 639-1 codes. sentencex silently uses English rules for codes that it does not know."""
_THREE_LETTERS = """
aae acm aeb als alt anp apc arc arn arq ary arz ast atj avk awa bar bci blk bpy bxr csb dsb dua egl eml ext fit fon frc
frp frr fur gcf gcr gld gsw guc hke hrx hsb hyw inh jut kaa kab kbp kea kjh kjp koi krc krl ksh ksw kum lad lbe lez lij
lld lmo lua mag mai mdf mhr mnw mrj mwl myv nah nap nds olo pcd pdc pdt pfl pms pnt qug rgn rue rut sah scn sdc ses shy
sjd sli smn srn sro stq sty szl tcy tet tyv udm vec vls vmf vmw vot wls xal
"""
_KNOWN = LANGUAGES | {*_THREE_LETTERS.split()}
"""With the codes of ISO 639-3 that sentencex 1.0 splits by other rules than the English."""


def sentence_splitter(language: str, option: str = "--split-sentences") -> Callable[[str], list[str]]:
    """A function that splits a line into sentences that concatenate to the line, white space included.

    Uses sentencex (MIT licence, by Wikimedia), which knows the abbreviations of some 240 languages and otherwise uses a
    related language or splits at full stops. language: a code such as en or de. option: the user's spelling, for
    errors. Raises UserError for an invalid code, or if sentencex is not installed.
    """
    if not re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]+)*", language, re.IGNORECASE):
        raise UserError(f"{option} {language!r}: give the language of the input, such as en or de")
    name = language.lower()  # sentencex knows no other case
    code = name.partition("-")[0]
    if code not in _KNOWN:
        raise UserError(
            f"{option} {language!r}: is not a language of ISO 639-1, and sentencex has no rules for it: give its code "
            "of two letters, or that of a similar language, such as en or de"
        )
    segment = optional("sentencex", "sentences").segment
    return lambda line: list(segment(name, line))


def sentences_of(line: str, split: Callable[[str], list[str]]) -> list[str]:
    """Non-blank sentences of a line; at least one."""
    return [part for part in split(line) if has_text(part)] or [line]


def translate_sentences(
    translator: Translator, lines: Iterable[str], split: Callable[[str], list[str]]
) -> Iterator[list[Translation]]:
    """Translate each line sentence by sentence, like Translator.translate_stream() with one translation per line.

    Log-probabilities are summed, scores averaged, alignments refer to the line. The translator's counters count
    sentences and name lines.
    """
    waiting: deque[list[str]] = deque()  # sentences of lines not finished yet
    first_sentences: list[int] = []  # number of the first sentence of each line, from 1
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


def join_sentences(sentences: Sequence[str], translations: Sequence[Translation], separator: str = "") -> Translation:
    """The translation of a text, joined from those of its sentences by the separator, or by spaces where needed."""
    source = text = ""
    source_words = target_words = 0
    links: list[tuple[int, int]] = []
    for index, (sentence, each) in enumerate(zip(sentences, translations)):
        if separator:
            text += separator if index else ""
        elif text and each.text and not _NO_SPACE_AFTER.search(text[-1]):
            text += " "
        source_words -= _same_word(source, sentence)
        target_words -= _same_word(text, each.text)
        links += [(one + source_words, other + target_words) for one, other in each.alignment]
        source_words += len(WORDS.findall(sentence))
        target_words += len(WORDS.findall(each.text))
        source += sentence
        text += each.text
    score = sum(each.score for each in translations) / len(translations)
    return Translation(text, score, sum(each.log_probability for each in translations), tuple(links))


def _same_word(before: str, after: str) -> bool:
    """Return whether the last word of `before` continues in `after`."""
    return bool(before and after) and not before[-1].isspace() and not after[0].isspace()
