"""Draws the phrases of the demo corpus: noun phrases of every kind, numbers, times, dates and places."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from fasttfm.data.demo import german, lexicon
from fasttfm.data.demo.clause import NounPhrase, Phrase, of
from fasttfm.data.demo.lexicon import Adjective, Noun, Place

T = TypeVar("T")

# Role of a phrase -> determiners of its singular and plural, English, German and weight.
_Weights = tuple[tuple[tuple[str, str], float], ...]
_DEFINITES: _Weights = ((("the", "d"), 10), (("this", "dies"), 2))
_DEFINITE_PLURALS: _Weights = ((("the", "d"), 5), (("these", "dies"), 1))
_INDEFINITES: _Weights = (*_DEFINITES, (("a", "ein"), 6))
_INDEFINITE_PLURALS: _Weights = (*_DEFINITE_PLURALS, (("many", "viel"), 1))
_DETERMINERS = {
    "definite": (_DEFINITES, _DEFINITE_PLURALS),
    "object": (_INDEFINITES, _INDEFINITE_PLURALS),
    "denied": (((("no", "kein"), 1),), ((("no", "kein"), 1),)),
    "subject": (
        (*_INDEFINITES, (("every", "jed"), 1), (("no", "kein"), 0.7)),
        (*_INDEFINITE_PLURALS, (("all", "all"), 1)),
    ),
}
_PLURAL_SHARE = 0.25
_PRONOUN_SHARE = 0.3
_COMPOUND_SHARE = 0.3
_POSSESSIVE_SHARE = 0.2


def number(n: int) -> Phrase:
    """2 to 99 in words; German says the unit first: einundzwanzig."""
    if n < 20:
        return Phrase(*lexicon.UNITS[n])
    (tens_en, tens_de), (unit_en, unit_de) = lexicon.TENS[n // 10], lexicon.UNITS[n % 10]
    return Phrase(tens_en, tens_de) if n % 10 == 0 else Phrase(f"{tens_en}-{unit_en}", f"{unit_de}und{tens_de}")


def digits(n: int) -> Phrase:
    """In digits; thousands are parted by a comma in English and a full stop in German."""
    return Phrase(f"{n:,}", f"{n:,}".replace(",", "."))


class Phrases:
    """Draws from one generator. Only random.random() is used, whose sequence Python keeps across versions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.compounds = {kind: _compounds(nouns) for kind, nouns in lexicon.NOUNS.items()}
        self.places = lexicon.PLACES + [
            Place(noun, place.en_at, place.de_at) for place in lexicon.PLACES for noun in _compounds([place.noun])
        ]
        self._relations = [noun for noun in lexicon.NOUNS["persons"] if noun.en in _RELATIONS]

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def weighted(self, options: Sequence[tuple[T, float]]) -> T:
        place = self._random.random() * sum(weight for _, weight in options)
        for option, weight in options:
            place -= weight
            if place < 0:
                return option
        return options[-1][0]

    def adjectives(self, kind: str) -> list[Adjective]:
        """All that suit nouns of this kind."""
        return lexicon.ADJECTIVES.get(kind, lexicon.ADJECTIVES["things"])

    def adjective(self, kind: str, said: str, comparable: bool = False) -> Adjective:
        """One that neither repeats nor contradicts what is said already, in English."""
        ruled_out = {word for group in _OPPOSITES for word in group if group & set(said.split())} | set(said.split())
        fitting = [a for a in self.adjectives(kind) if a.en not in ruled_out and (a.en_comparative or not comparable)]
        return self.pick(fitting)

    def noun(self, kind: str) -> Noun:
        compounds = self.compounds[kind]
        return self.pick(compounds if compounds and self.chance(_COMPOUND_SHARE) else lexicon.NOUNS[kind])

    def noun_phrase(
        self,
        kind: str,
        role: str = "object",
        *,
        plural: bool | None = None,
        noun: Noun | None = None,
        possessive: bool = True,
    ) -> NounPhrase:
        """Determiner, perhaps adjectives, noun.

        role: "subject", "object", "definite" (an object that "nicht" can negate) or "denied" (no book, kein Buch).
        possessive: whether it may be "my book"; not where "of the baker" follows.
        """
        noun = noun or self.noun(kind)
        plural = self.chance(_PLURAL_SHARE) if plural is None else plural
        en, de = self._determiner(plural, role, possessive and role != "denied")
        count = self.weighted(((0, 6), (1, 4), (2, 0.3)))
        adjectives: list[Adjective] = []
        while len(adjectives) < count:
            adjectives.append(self.adjective(kind, " ".join(adjective.en for adjective in adjectives)))
        return self._assemble(en, de, adjectives, noun, plural)

    def the(self, kind: str, noun: Noun | None = None) -> NounPhrase:
        """The plain definite singular."""
        return self._assemble("the", "d", [], noun or self.noun(kind), plural=False)

    def person(self, role: str = "object") -> NounPhrase:
        """Somebody, not a pronoun: a noun, a name, Mr Fischer, the friend of the baker."""
        kind = self.weighted((("noun", 10), ("name", 3), ("title", 1), ("of", 0.7)))
        if kind == "name":
            return _invariable(self.pick(lexicon.NAMES))
        if kind == "title":
            return self._titled()
        if kind == "of":
            relation = self.noun_phrase("persons", role, noun=self.pick(self._relations), possessive=False)
            return of(relation, self.the("persons"))
        return self.noun_phrase("persons", role)

    def subject(self, role: str = "subject") -> NounPhrase:
        """Who acts: a pronoun, or a person."""
        return self.pronoun() if self.chance(_PRONOUN_SHARE) else self.person(role)

    def pronoun(self, other_than: NounPhrase | None = None) -> NounPhrase:
        """A personal pronoun that does not overlap with other_than: neither "I ask me" nor "we ask me"."""
        while True:
            en, en_object, _, nom, acc, dat, _, person = self.pick(lexicon.PRONOUNS)
            overlaps = other_than is not None and (
                person == other_than.person or {person, other_than.person} == {"1s", "1p"}
            )
            if not overlaps:
                cases = {"nom": nom, "acc": acc, "dat": dat}
                return NounPhrase(en, cases, person, en_object=en_object, pronoun=True, early=True)

    def amount(self, kind: str, *, large: bool = False) -> NounPhrase:
        """Seven books, twenty-one books, 1,250 books."""
        if large:
            numeral = digits(self.between(100, 9999))
        else:
            numeral = number(self.between(2, 12) if self.chance(0.6) else self.between(13, 99))
        adjectives = [self.pick(self.adjectives(kind))] if self.chance(0.25) else []
        return self._assemble(numeral.en, numeral.de, adjectives, self.noun(kind), plural=True)

    def at_place(self) -> Phrase:
        """in the kitchen, at the station, in Berlin."""
        if self.chance(0.15):
            en, de = self.pick(lexicon.CITIES)
            return Phrase(f"in {en}", f"in {de}")
        place = self.pick(self.places)
        phrase = self.noun_phrase("places", "definite", plural=False, noun=place.noun)
        return Phrase(f"{place.en_at} {phrase.en}", german.with_preposition(place.de_at, phrase.de["dat"]))

    def to_place(self) -> Phrase:
        """to the station (zu, dative) or into the kitchen (in, accusative)."""
        place = self.pick(self.places)
        phrase = self.noun_phrase("places", "definite", plural=False, noun=place.noun)
        if place.de_at == "in" and self.chance(0.4):
            return Phrase(f"into {phrase.en}", german.with_preposition("in", phrase.de["acc"]))
        return Phrase(f"to {phrase.en}", german.with_preposition("zu", phrase.de["dat"]))

    def to_city(self) -> Phrase:
        en, de = self.pick(lexicon.CITIES)
        return Phrase(f"to {en}", f"nach {de}")

    def company(self) -> Phrase:
        """with the dog, without the aunt."""
        phrase = self.noun_phrase(self.pick(("persons", "animals")), "definite")
        en, de, case = self.pick((("with", "mit", "dat"), ("without", "ohne", "acc")))
        return Phrase(f"{en} {phrase.en}", f"{de} {phrase.de[case]}")

    def beneficiary(self) -> Phrase:
        """for the guest."""
        phrase = self.person("definite")
        return Phrase(f"for {phrase.en}", f"für {phrase.de['acc']}")

    def beside_furniture(self) -> Phrase:
        """under the table, next to the old bed."""
        furniture = [noun for noun in lexicon.NOUNS["things"] if noun.en in _FURNITURE]
        furniture += [noun for noun in self.compounds["things"] if noun.en.split()[-1] in _FURNITURE]
        phrase = self.noun_phrase("things", "definite", plural=False, noun=self.pick(furniture))
        en, de = self.pick(_POSITIONS)
        return Phrase(f"{en} {phrase.en}", german.with_preposition(de, phrase.de["dat"]))

    def clock(self) -> Phrase:
        """at seven o'clock, at half past seven (halb acht), at 14:30."""
        en, de = lexicon.UNITS[hour := self.between(1, 12)]
        kind = self.weighted((("full", 3), ("half", 2), ("digital", 1)))
        if kind == "full":
            return Phrase(f"at {en} o'clock", f"um {de} Uhr")
        if kind == "half":
            following = lexicon.UNITS[hour + 1][1] if hour < 12 else "eins"
            return Phrase(f"at half past {en}", f"um halb {following}")
        time = f"{self.between(6, 23)}:{self.between(1, 11) * 5:02d}"
        return Phrase(f"at {time}", f"um {time} Uhr")

    def date(self) -> Phrase:
        """on 14 March 1987"""
        (en, de), day, year = self.pick(lexicon.MONTHS), self.between(1, 28), self.between(1950, 2019)
        return Phrase(f"on {day} {en} {year}", f"am {day}. {de} {year}")

    def time(self, tense: str) -> Phrase:
        """When, fitting the tense: present, past or future."""
        common: list[tuple[Callable[[], Phrase], float]] = [
            (self.weekday, 3),
            (self._month, 1),
            (self.clock, 1.5),
            (lambda: self.pick(_DAYTIMES), 1.5),
            (self._day_and_hour, 0.7),
        ]
        special: dict[str, list[tuple[Callable[[], Phrase], float]]] = {
            "present": [(lambda: TODAY, 1.5), (lambda: self._week("every", "jede"), 1.5)],
            "past": [
                (lambda: YESTERDAY, 2),
                (lambda: self._week("last", "letzte"), 1.5),
                (self._year, 1),
                (self.date, 1.5),
                (lambda: self._distance("{} ago", "vor {}"), 1),
            ],
            "future": [
                (lambda: TOMORROW, 2),
                (lambda: self._week("next", "nächste"), 1.5),
                (lambda: self._distance("in {}", "in {}"), 1),
            ],
        }
        return self.weighted(common + special[tense])()

    def weekday(self) -> Phrase:
        en, de = self.pick(lexicon.WEEKDAYS)
        return Phrase(f"on {en}", f"am {de}")

    def _day_and_hour(self) -> Phrase:
        day, hour = self.weekday(), self.clock()
        return Phrase(f"{day.en} {hour.en}", f"{day.de} {hour.de}")

    def _month(self) -> Phrase:
        en, de = self.pick(lexicon.MONTHS)
        return Phrase(f"in {en}", f"im {de}")

    def _year(self) -> Phrase:
        year = self.between(1900, 2019)
        return Phrase(f"in {year}", f"im Jahr {year}")

    def _week(self, en: str, de: str) -> Phrase:
        """every week, next Monday."""
        if self.chance(0.4):
            return Phrase(f"{en} week", f"{de} Woche")
        day_en, day_de = self.pick(lexicon.WEEKDAYS)
        return Phrase(f"{en} {day_en}", f"{de}n {day_de}")

    def _distance(self, en: str, de: str) -> Phrase:
        """two days ago, in seven weeks."""
        n = number(self.between(2, 12))
        unit_en, unit_de = self.pick(_UNITS_OF_TIME)
        return Phrase(en.format(f"{n.en} {unit_en}"), de.format(f"{n.de} {unit_de}"))

    def _titled(self) -> NounPhrase:
        name = self.pick(lexicon.SURNAMES)
        if self.chance(0.5):
            others = f"Herrn {name}"
            return NounPhrase(f"Mr {name}", {"nom": f"Herr {name}", "acc": others, "dat": others}, early=True)
        return NounPhrase(f"Mrs {name}", dict.fromkeys(("nom", "acc", "dat"), f"Frau {name}"), gender="f", early=True)

    def _determiner(self, plural: bool, role: str, possessive: bool) -> tuple[str, str]:
        if possessive and self.chance(_POSSESSIVE_SHARE):
            pronoun = self.pick(lexicon.PRONOUNS)
            return pronoun[2], pronoun[6]
        return self.weighted(_DETERMINERS[role][int(plural)])

    def _assemble(self, en: str, de: str, adjectives: list[Adjective], noun: Noun, plural: bool) -> NounPhrase:
        words = [adjective.en for adjective in adjectives] + [noun.en_plural if plural else noun.en]
        if en == "a" and words[0][0] in "aeiou":
            en = "an"
        return NounPhrase(
            en=" ".join([en, *words]),
            de={case: german.noun_phrase(de, adjectives, noun, case, plural) for case in german.CASES},
            person="3p" if plural else "3s",
            gender="p" if plural else noun.gender,
        )


_OPPOSITES = (
    {"old", "young", "new"},
    {"big", "small", "tall"},
    {"rich", "poor"},
    {"cheap", "expensive"},
    {"warm", "cold"},
    {"red", "blue", "green", "white", "black"},
    {"strong", "tired"},
)
_RELATIONS = {
    "brother", "sister", "mother", "father", "aunt", "uncle", "daughter", "son", "friend", "neighbour",
    "teacher", "doctor", "grandmother", "grandfather",
}  # fmt: skip
_FURNITURE = {"table", "chair", "bed", "box", "bicycle"}
_POSITIONS = (
    ("on", "auf"),
    ("under", "unter"),
    ("behind", "hinter"),
    ("next to", "neben"),
    ("in front of", "vor"),
)
TODAY, YESTERDAY, TOMORROW = Phrase("today", "heute"), Phrase("yesterday", "gestern"), Phrase("tomorrow", "morgen")
_UNITS_OF_TIME = (("days", "Tagen"), ("weeks", "Wochen"), ("months", "Monaten"), ("years", "Jahren"))
_DAYTIMES = (
    Phrase("in the morning", "am Morgen"),
    Phrase("in the evening", "am Abend"),
    Phrase("in the afternoon", "am Nachmittag"),
    Phrase("at night", "in der Nacht"),
)


def _compounds(heads: Sequence[Noun]) -> list[Noun]:
    """All compound nouns with one of these heads: kitchen table, Küchentisch."""
    compounds = []
    for (en, de), allowed in lexicon.COMPOUNDS.items():
        for head in heads:
            if head.en in allowed.split():
                compounds.append(
                    head._replace(
                        en=f"{en} {head.en}",
                        en_plural=f"{en} {head.en_plural}",
                        de=de + head.de.lower(),
                        genitive=de + head.genitive.lower(),
                        plural=de + head.plural.lower(),
                        oblique=de + head.oblique.lower(),
                    )
                )
    return compounds


def _invariable(name: str) -> NounPhrase:
    gender = "f" if name.endswith("a") else "m"
    return NounPhrase(name, dict.fromkeys(("nom", "acc", "dat"), name), gender=gender, early=True)
