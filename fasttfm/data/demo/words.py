"""The words of the demo corpus, as grammar.yaml has them, and German's inflection of them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fasttfm.parsing import parse_yaml

GRAMMAR = parse_yaml((Path(__file__).parent / "grammar.yaml").read_bytes())
CASES = ("nom", "acc", "dat", "gen")
PERSONS = ("1s", "2s", "3s", "1p", "3p")


class Noun(NamedTuple):
    """A noun; gender m, f or n; de is the nominative, oblique the accusative and dative singular."""

    en: str
    en_plural: str
    gender: str
    de: str
    genitive: str
    plural: str
    oblique: str

    def form(self, case: str, plural: bool) -> str:
        """The German noun in its case."""
        if plural:
            return self.plural + ("n" if case == "dat" and not self.plural.endswith(("n", "s")) else "")
        return {"nom": self.de, "gen": self.genitive}.get(case, self.oblique)


class Adjective(NamedTuple):
    """An adjective; comparatives are empty where they make no sense, attributive endings are added to stem."""

    en: str
    de: str
    en_comparative: str
    de_comparative: str
    stem: str


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

    def present(self, person: str) -> str:
        """The finite present, without the separable prefix."""
        others = "sind" if self.en == "be" else self.infinitive
        return {"1s": self.first, "2s": self.second, "3s": self.third}.get(person, others)

    def preterite(self, person: str) -> str:
        """The finite preterite, without the separable prefix."""
        you = "est" if self.past.endswith(("t", "d", "s", "ß")) else "st"
        ending = {"1s": "", "2s": you, "3s": ""}.get(person, "n" if self.past.endswith("e") else "en")
        return self.past + ending

    def parts(self, tense: str, person: str, modal: Sequence[str]) -> tuple[str, str, str]:
        """(finite, end, prefix): the finite verb, what stands at the end of the clause, a prefix torn off in front.

        In a main clause the finite verb comes second and end + prefix last; in a subordinate one the order is end,
        prefix + finite. modal: the forms of a modal verb for all persons, with tense "modal".
        """
        if tense in ("present", "past"):
            return (self.present if tense == "present" else self.preterite)(person), "", self.prefix
        if tense == "perfect":
            return (SEIN if self.auxiliary == "sein" else HABEN).present(person), self.participle, ""
        finite = WERDEN.present(person) if tense == "future" else modal[PERSONS.index(person)]
        return finite, self.prefix + self.infinitive, ""


def ending(table: str, gender: str, case: str) -> str:
    """The ending in one of the grammar's tables; of table d the article itself, and the relative pronoun."""
    return GRAMMAR["endings"][table][gender].split()[CASES.index(case)].removeprefix("-")


def declined(determiner: str, adjectives: Sequence[Adjective], noun: Noun, case: str, plural: bool) -> str:
    """A German noun phrase. determiner: "d" for der/die/das, a stem (dies, ein, kein, mein …), or a numeral."""
    gender = "p" if plural else noun.gender
    endings = "weak"
    if determiner == "d":
        determiner = ending("d", gender, case)
    elif determiner in GRAMMAR["declined_like_der"].split():
        endings = "strong" if determiner == "viel" else "weak"
        determiner += ending("like_der", gender, case)
    elif determiner in GRAMMAR["declined_like_ein"].split():
        endings = "mixed"
        determiner += ending("like_ein", gender, case)
    else:
        endings = "strong"
    return " ".join(
        [determiner, *(each.stem + ending(endings, gender, case) for each in adjectives), noun.form(case, plural)]
    )


def contracted(text: str) -> str:
    """German text with prepositions and articles as one word where German does so: in dem -> im."""
    return _CONTRACTED.sub(lambda match: GRAMMAR["contractions"][match[0]], text)


_CONTRACTED = re.compile(rf"\b({'|'.join(GRAMMAR['contractions'])})\b")


def _words(text: str) -> list[str]:
    """Words, in whose place "-" is none and "_" a space."""
    return ["" if word == "-" else word.replace("_", " ") for word in text.split()]


def _rows(table: str) -> list[list[str]]:
    return [_words(line) for line in table.splitlines()]


def _nouns(table: str) -> list[Noun]:
    return [Noun._make([*row[:6], row[-1] if len(row) > 6 else row[3]]) for row in _rows(table)]


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


def _compounds(heads: Sequence[Noun]) -> list[Noun]:
    """All compound nouns with one of these heads: kitchen table, Küchentisch."""
    return [
        Noun(f"{en} {head.en}", f"{en} {head.en_plural}", head.gender, *(de + form.lower() for form in head[3:]))
        for (en, de), allowed in ((key.split(), allowed.split()) for key, allowed in GRAMMAR["compounds"].items())
        for head in heads
        if head.en in allowed
    ]


_PLACES = [(noun, *key.split()) for key, table in GRAMMAR["places"].items() for noun in _nouns(table)]
PLACES = _PLACES + [(noun, *place[1:]) for place in _PLACES for noun in _compounds(place[:1])]
"""(noun, English preposition, German preposition with the dative): how one is at a place."""
NOUNS = {kind: _nouns(table) for kind, table in GRAMMAR["nouns"].items()} | {"places": [place[0] for place in _PLACES]}
COMPOUNDS = {kind: _compounds(nouns) for kind, nouns in NOUNS.items()}
"""Kind -> its nouns."""
ADJECTIVES = {
    kind: [_adjective(*row) for word in words.split() for row in _rows(GRAMMAR["adjectives"]) if row[0] == word]
    for kind, words in GRAMMAR["adjectives_of"].items()
}
"""Kind of noun -> the adjectives that suit it."""
PAIRS = {name: list(zip(*[iter(_words(text))] * 2)) for name, text in GRAMMAR["pairs"].items()}
"""Name -> (English, German); units are 0 to 19, tens 20 to 90 at their tens."""
LISTS = {name: text.split() for name, text in GRAMMAR["lists"].items()}
PRONOUNS, BEGINNINGS, MODALS = (_rows(GRAMMAR[name]) for name in ("pronouns", "beginnings", "modals"))
VERBS = {kind: [_verb(line) for line in table.splitlines()] for kind, table in GRAMMAR["verbs"].items()}
SEIN, HABEN, WERDEN = VERBS["auxiliary"]
TRANSITIVE = [
    (_verb(line), kinds.split()) for kinds, table in GRAMMAR["transitive"].items() for line in table.splitlines()
]
"""(verb, kinds of nouns that can be its accusative object)."""
