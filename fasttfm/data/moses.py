"""German text cut into tokens as Moses' tokenizer does it: what tokenised BLEU of WMT14 English-German was counted on.

Written from the rules of tokenizer.perl -l de: what is neither letter, digit, space nor one of . ' ` , - stands alone;
dots in a row are a token; a comma stands alone but between digits; an apostrophe stands alone; and a full stop ends a
sentence unless what is before it is an abbreviation, or a small letter follows. Nothing is escaped (&quot; and its
like), which changes both sides of a score alike.
Source: Koehn et al. 2007, Moses: Open Source Toolkit for Statistical Machine Translation.
"""

import re
import unicodedata
from functools import cache
from string import ascii_letters

_WORDS = """
I II III IV V VI VII VIII IX X XI XII XIII XIV XV XVI XVII XVIII XIX XX Dr DR Prof Mr Mrs Ms Messrs Sr St Rev
Hon Gov Sen Sens Rep Reps Res Gen Col Comdr Maj Capt Cpl Lt Sgt Sfc Pvt Pfc Ens Brig Adm Supt Insp Surg Asst
Hosp Bldg Bart Adj Adv Con Ord Op MM Ph Chr Bros Co Corp Ltd Nr No Art Std Zt Mio Mrd MwSt bzgl bzw ca dgl etc
evtl ff ggf sen sog sogen usf usw vgl vs
"""
ABBREVIATIONS = frozenset([*ascii_letters, *map(str, range(1, 100)), *_WORDS.split()])
"""What a full stop belongs to, whatever follows; days and the numbers of kings among it."""

_OTHER = re.compile(r"[^\sA-Za-z0-9.'`,-]")
_DOTS = re.compile(r"\.{2,}")
_COMMA = re.compile(r"(.?),(?=(.?))", re.DOTALL)


def moses_tokens(line: str) -> list[str]:
    """The tokens of a line."""
    line = re.sub(r"[\x00-\x1f]", "", re.sub(r"\s+", " ", line)).strip()
    line = _OTHER.sub(lambda found: found[0] if _is_alnum(found[0]) else f" {found[0]} ", line)
    line = _DOTS.sub(lambda found: f" {found[0].translate(_HIDDEN)} ", line)
    line = _COMMA.sub(_apart, line)
    words = line.replace("'", " ' ").split()
    tokens: list[str] = []
    for word, following in zip(words, [*words[1:], ""]):
        before = word[:-1]
        splits = word.endswith(".") and before and not _keeps_stop(before, following)
        tokens += [before, "."] if splits else [word]
    return [token.translate(_SHOWN) for token in tokens]


_HIDDEN, _SHOWN = {ord("."): "\ue000"}, {0xE000: "."}
"""Dots in a row are not full stops."""


def _apart(comma: re.Match[str]) -> str:
    before, after = comma[1], comma[2]
    return comma[0] if _is_number(before) and _is_number(after) else f"{before} , "


def _keeps_stop(word: str, following: str) -> bool:
    """Return whether the full stop after a word belongs to it."""
    has_letter = any(map(str.isalpha, word))
    return ("." in word and has_letter) or word in ABBREVIATIONS or following[:1].islower()


@cache
def _is_alnum(character: str) -> bool:
    """Perl's \\p{IsAlnum}: letters, decimal digits and letters that are numbers, such as Ⅻ."""
    return character.isalpha() or unicodedata.category(character) in ("Nd", "Nl")


def _is_number(character: str) -> bool:
    """Perl's \\p{IsN}: any number, such as ½; False for no character."""
    return bool(character) and unicodedata.category(character).startswith("N")
