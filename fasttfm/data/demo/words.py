"""The words of the demo corpus, as grammar.yaml has them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fasttfm.parsing import parse_yaml

GRAMMAR = parse_yaml((Path(__file__).parent / "grammar.yaml").read_bytes())


class Noun(NamedTuple):
    """A noun; gender m, f or n; de is the nominative, oblique the accusative and dative singular."""

    en: str
    en_plural: str
    gender: str
    de: str
    genitive: str
    plural: str
    oblique: str


class Adjective(NamedTuple):
    """An adjective; comparatives are empty where they make no sense, attributive endings are added to stem."""

    en: str
    de: str
    en_comparative: str
    de_comparative: str
    stem: str


class Place(NamedTuple):
    """A place, and how one is there: the preposition in each language (German with the dative)."""

    noun: Noun
    en_at: str
    de_at: str


class Verb(NamedTuple):
    """A verb's principal parts: I, you and he of the present, the past and the participle with its auxiliary.

    The separable prefix stands in the participle and apart from the other forms.
    """

    en: str
    en_third: str
    en_past: str
    en_participle: str
    prefix: str
    infinitive: str
    first: str
    second: str
    third: str
    past: str
    participle: str
    auxiliary: str


def _words(text: str) -> list[str]:
    """Words, in whose place "-" is none and "_" a space."""
    return ["" if word == "-" else word.replace("_", " ") for word in text.split()]


def rows(table: str) -> list[list[str]]:
    """The words of each line."""
    return [_words(line) for line in table.splitlines()]


def _nouns(table: str) -> list[Noun]:
    return [Noun._make([*row[:6], row[-1] if len(row) > 6 else row[3]]) for row in rows(table)]


def _adjective(en: str, de: str, en_comparative: str = "", de_comparative: str = "", stem: str = "") -> Adjective:
    return Adjective(en, de, en_comparative, de_comparative, stem or de)


def _verb(line: str) -> Verb:
    english, german = map(_words, line.split(":"))
    auxiliary = "sein" if german[-1] == "s" else "haben"
    prefix, _, infinitive = german[0].rpartition("|")
    forms = german[1:6] if len(german) > 5 else _regular(infinitive, prefix)
    return Verb._make([*english[:3], english[-1], prefix, infinitive, *forms, auxiliary])


def _regular(infinitive: str, prefix: str) -> list[str]:
    """first, second, third, past and participle of a weak verb."""
    stem = infinitive.removesuffix("n") if infinitive.endswith(("ern", "eln")) else infinitive.removesuffix("en")
    link = "e" if stem.endswith(("t", "d", "chn", "ffn")) else ""
    second = f"{stem}t" if stem.endswith(("s", "ß", "z")) else f"{stem}{link}st"
    no_ge = infinitive.startswith(("be", "ver", "er", "emp", "ent", "zer")) or infinitive.endswith("ieren")
    return [f"{stem}e", second, f"{stem}{link}t", f"{stem}{link}te", f"{prefix}{'' if no_ge else 'ge'}{stem}{link}t"]


def compounds(heads: list[Noun]) -> list[Noun]:
    """All compound nouns with one of these heads: kitchen table, Küchentisch."""
    return [
        Noun(f"{en} {head.en}", f"{en} {head.en_plural}", head.gender, *(de + form.lower() for form in head[3:]))
        for (en, de), allowed in ((key.split(), allowed.split()) for key, allowed in GRAMMAR["compounds"].items())
        for head in heads
        if head.en in allowed
    ]


PLACES = [Place(noun, *key.split()) for key, table in GRAMMAR["places"].items() for noun in _nouns(table)]
NOUNS = {kind: _nouns(table) for kind, table in GRAMMAR["nouns"].items()} | {"places": [p.noun for p in PLACES]}
COMPOUNDS = {kind: compounds(nouns) for kind, nouns in NOUNS.items()}
"""Kind -> its nouns."""
ADJECTIVES = {
    kind: [_adjective(*row) for word in words.split() for row in rows(GRAMMAR["adjectives"]) if row[0] == word]
    for kind, words in GRAMMAR["adjectives_of"].items()
}
"""Kind of noun -> the adjectives that suit it."""
PAIRS = {name: list(zip(*[iter(_words(text))] * 2)) for name, text in GRAMMAR["pairs"].items()}
"""Name -> (English, German); units are 0 to 19, tens 20 to 90 at their tens."""
LISTS = {name: text.split() for name, text in GRAMMAR["lists"].items()}
PRONOUNS, BEGINNINGS, MODALS = (rows(GRAMMAR[name]) for name in ("pronouns", "beginnings", "modals"))
VERBS = {kind: [_verb(line) for line in table.splitlines()] for kind, table in GRAMMAR["verbs"].items()}
TRANSITIVE = [
    (_verb(line), kinds.split()) for kinds, table in GRAMMAR["transitive"].items() for line in table.splitlines()
]
"""(verb, kinds of nouns that can be its accusative object)."""
