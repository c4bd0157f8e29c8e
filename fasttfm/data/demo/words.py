"""The words of the demo corpus (grammar.yaml) and German inflection."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fasttfm.system.parsing import parse_yaml

GRAMMAR = parse_yaml((Path(__file__).parent / "grammar.yaml").read_bytes())
CASES = ("nom", "acc", "dat", "gen")
PERSONS = ("1s", "2s", "3s", "1p", "3p")


class Noun(NamedTuple):
    """A noun; gender m, f or n; forms: German nominative, genitive, plural, and perhaps accusative and dative."""

    en: str
    en_plural: str
    gender: str
    forms: Sequence[str]

    def form(self, case: str, plural: bool) -> str:
        """The German noun, inflected."""
        if plural:
            ending = "n" if case == "dat" and not self.forms[2].endswith(("n", "s")) else ""
            return self.forms[2] + ending
        oblique = self.forms[-1] if len(self.forms) > 3 else self.forms[0]
        return {"nom": self.forms[0], "gen": self.forms[1]}.get(case, oblique)


class Verb(NamedTuple):
    """A verb. The participle includes the separable prefix; the other forms do not."""

    en: str
    en_third: str
    en_past: str
    en_participle: str
    prefix: str
    infinitive: str
    present: Sequence[str]
    past: str
    participle: str
    auxiliary: str

    def finite(self, tense: str, person: str) -> str:
        """The German present or past form, without the separable prefix."""
        number = PERSONS.index(person)
        if tense == "present":
            return self.present[min(number, 3)]
        you = "est" if self.past.endswith(("t", "d", "s", "ß")) else "st"
        plural = "n" if self.past.endswith("e") else "en"
        return self.past + ["", you, "", plural, plural][number]


def ending(table: str, gender: str, case: str) -> str:
    """An ending from one of the grammar's tables; table d has the articles, which are also relative pronouns."""
    return GRAMMAR["endings"][table][gender].split()[CASES.index(case)].removeprefix("-")


def declined(determiner: str, adjectives: Sequence[str], noun: Noun, case: str, plural: bool) -> str:
    """A German noun phrase. determiner: "d" for der/die/das, a stem (dies, ein, kein, mein …), or a numeral."""
    gender = "p" if plural else noun.gender
    endings = "strong"
    if determiner == "d":
        determiner, endings = ending("d", gender, case), "weak"
    elif determiner in GRAMMAR["declined_like_der"].split():
        endings = "strong" if determiner == "viel" else "weak"
        determiner += ending("like_der", gender, case)
    elif determiner in GRAMMAR["declined_like_ein"].split():
        endings = "mixed"
        determiner += ending("like_ein", gender, case)
    return " ".join(
        [determiner, *(each + ending(endings, gender, case) for each in adjectives), noun.form(case, plural)]
    )


def contracted(text: str) -> str:
    """Contract German prepositions and articles: in dem -> im."""
    forms = GRAMMAR["contractions"]
    return re.sub(rf"\b({'|'.join(forms)})\b", lambda match: forms[match[0]], text)


def _words(text: str) -> list[str]:
    """The words of a line; "-" is empty and "_" a space."""
    return ["" if word == "-" else word.replace("_", " ") for word in text.replace(": ", " ").split()]


def rows(table: str) -> list[list[str]]:
    return [_words(line) for line in table.splitlines()]


def _nouns(table: str) -> list[Noun]:
    return [Noun(row[0], row[1], row[2], row[3:]) for row in rows(table)]


def _verbs(table: str) -> list[Verb]:
    return [Verb._make([*row[:6], row[6:10], *row[10:]]) for row in rows(table)]


PLACES = [(noun, *key.split()) for key, table in GRAMMAR["places"].items() for noun in _nouns(table)]
"""(noun, English preposition, German preposition with the dative) of a location."""
NOUNS = {kind: _nouns(table) for kind, table in GRAMMAR["nouns"].items()} | {"places": [place[0] for place in PLACES]}
_ADJECTIVES = {row[0]: row for row in rows(GRAMMAR["adjectives"])}
ADJECTIVES = {kind: [_ADJECTIVES[en] for en in text.split()] for kind, text in GRAMMAR["adjectives_of"].items()}
"""Kind of noun -> matching adjectives: English, German, and optionally the stem of the attributive forms."""
PAIRS = {name: list(zip(*[iter(_words(text))] * 2)) for name, text in GRAMMAR["pairs"].items()}
"""Name -> (English, German) pairs; units has 0 to 19, tens is indexed by n // 10."""
VERBS = {kind: _verbs(table) for kind, table in GRAMMAR["verbs"].items()}
SEIN, HABEN, WERDEN = VERBS["auxiliary"]
TRANSITIVE = [(verb, kinds.split()) for kinds, table in GRAMMAR["transitive"].items() for verb in _verbs(table)]
"""(verb, kinds of nouns that it takes as accusative object)."""
