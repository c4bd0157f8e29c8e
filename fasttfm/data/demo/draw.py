"""Draws the phrases of the demo corpus: noun phrases of every kind, numbers, times, dates and places."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from fasttfm.data.demo import german
from fasttfm.data.demo.clause import NounPhrase, Phrase, of
from fasttfm.data.demo.words import (
    ADJECTIVES,
    COMPOUNDS,
    GRAMMAR,
    LISTS,
    NOUNS,
    PAIRS,
    PLACES,
    PRONOUNS,
    Adjective,
    Noun,
    Place,
    compounds,
)

T = TypeVar("T")
TODAY, YESTERDAY, TOMORROW = (Phrase(*pair) for pair in PAIRS["days"])
_PLACES = PLACES + [Place(noun, *place[1:]) for place in PLACES for noun in compounds([place.noun])]
_OPPOSITES = [set(group.split()) for group in GRAMMAR["opposites"]]
_RELATIONS = [noun for noun in NOUNS["persons"] if noun.en in LISTS["relations"]]
_FURNITURE = [n for n in NOUNS["things"] + COMPOUNDS["things"] if n.en.split()[-1] in LISTS["furniture"]]


def number(n: int) -> Phrase:
    """2 to 99 in words; German says the unit first: einundzwanzig."""
    if n < 20:
        return Phrase(*PAIRS["units"][n])
    (tens_en, tens_de), (unit_en, unit_de) = PAIRS["tens"][n // 10], PAIRS["units"][n % 10]
    return Phrase(tens_en, tens_de) if n % 10 == 0 else Phrase(f"{tens_en}-{unit_en}", f"{unit_de}und{tens_de}")


def digits(n: int) -> Phrase:
    """In digits; thousands are parted by a comma in English and a full stop in German."""
    return Phrase(f"{n:,}", f"{n:,}".replace(",", "."))


def invariable(en: str, de: str, others: str, gender: str) -> NounPhrase:
    """A name; others: its accusative and dative."""
    return NounPhrase(en, {"nom": de, "acc": others, "dat": others}, gender=gender, early=True)


def assemble(determiner: str, adjectives: Sequence[Adjective], noun: Noun, plural: bool) -> NounPhrase:
    """determiner: English and German, "the d" or "twenty-one einundzwanzig"."""
    en, de = determiner.split()
    words = [*(adjective.en for adjective in adjectives), noun.en_plural if plural else noun.en]
    return NounPhrase(
        en=" ".join(["an" if en == "a" and words[0][0] in "aeiou" else en, *words]),
        de={case: german.noun_phrase(de, adjectives, noun, case, plural) for case in german.CASES},
        person="3p" if plural else "3s",
        gender="p" if plural else noun.gender,
    )


class Phrases:
    """Draws from one generator. Only random.random() is used, whose sequence Python keeps across versions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def pair(self, name: str) -> Phrase:
        """One of PAIRS."""
        return Phrase(*self.pick(PAIRS[name]))

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def option(self, name: str) -> str:
        """One of the options that the grammar weighs under this name."""
        weights = GRAMMAR["weights"][name]
        place = self._random.random() * sum(weights.values())
        for option, weight in weights.items():
            place -= weight
            if place < 0:
                return option
        return list(weights)[-1]

    def adjective(self, kind: str, said: str, comparable: bool = False) -> Adjective:
        """One that neither repeats nor contradicts what is said already, in English."""
        ruled_out = set(said.split()).union(*(group for group in _OPPOSITES if group & set(said.split())))
        suiting = ADJECTIVES.get(kind, ADJECTIVES["things"])
        return self.pick([a for a in suiting if a.en not in ruled_out and (a.en_comparative or not comparable)])

    def noun(self, kind: str) -> Noun:
        return self.pick(COMPOUNDS[kind] if COMPOUNDS[kind] and self.chance(0.3) else NOUNS[kind])

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
        plural = self.chance(0.25) if plural is None else plural
        if possessive and role != "denied" and self.chance(0.2):
            pronoun = self.pick(PRONOUNS)
            determiner = f"{pronoun[2]} {pronoun[6]}"
        else:
            determiner = self.option(role + "_plural" * plural)
        adjectives: list[Adjective] = []
        for _ in range(int(self.option("adjectives"))):
            adjectives.append(self.adjective(kind, " ".join(adjective.en for adjective in adjectives)))
        return assemble(determiner, adjectives, noun, plural)

    def the(self, kind: str) -> NounPhrase:
        """The plain definite singular."""
        return assemble("the d", [], self.noun(kind), plural=False)

    def person(self, role: str = "object") -> NounPhrase:
        """Somebody, not a pronoun: a noun, a name, Mr Fischer, the friend of the baker."""
        kind = self.option("person")
        if kind == "name":
            name = self.pick(LISTS["names"])
            return invariable(name, name, name, "f" if name.endswith("a") else "m")
        if kind == "title":
            name = self.pick(LISTS["surnames"])
            if self.chance(0.5):
                return invariable(f"Mr {name}", f"Herr {name}", f"Herrn {name}", "m")
            return invariable(f"Mrs {name}", f"Frau {name}", f"Frau {name}", "f")
        if kind == "of":
            relation = self.noun_phrase("persons", role, noun=self.pick(_RELATIONS), possessive=False)
            return of(relation, self.the("persons"))
        return self.noun_phrase("persons", role)

    def subject(self, role: str = "subject") -> NounPhrase:
        """Who acts: a pronoun, or a person."""
        return self.pronoun() if self.chance(0.3) else self.person(role)

    def pronoun(self, other_than: NounPhrase | None = None) -> NounPhrase:
        """A personal pronoun that does not overlap with other_than: neither "I ask me" nor "we ask me"."""
        while True:
            en, en_object, _, nom, acc, dat, _, person = self.pick(PRONOUNS)
            both = {person, other_than.person} if other_than else set()
            if len(both) != 1 and both != {"1s", "1p"}:
                cases = {"nom": nom, "acc": acc, "dat": dat}
                return NounPhrase(en, cases, person, en_object=en_object, pronoun=True, early=True)

    def amount(self, kind: str, *, large: bool = False) -> NounPhrase:
        """Seven books, twenty-one books, 1,250 books."""
        if large:
            numeral = digits(self.between(100, 9999))
        else:
            numeral = number(self.between(2, 12) if self.chance(0.6) else self.between(13, 99))
        adjectives = [self.adjective(kind, "")] if self.chance(0.25) else []
        return assemble(" ".join(numeral), adjectives, self.noun(kind), plural=True)

    def _place(self) -> tuple[Place, NounPhrase]:
        place = self.pick(_PLACES)
        return place, self.noun_phrase("places", "definite", plural=False, noun=place.noun)

    def at_place(self) -> Phrase:
        """in the kitchen, at the station, in Berlin."""
        if self.chance(0.15):
            en, de = self.pair("cities")
            return Phrase(f"in {en}", f"in {de}")
        place, phrase = self._place()
        return Phrase(f"{place.en_at} {phrase.en}", german.with_preposition(place.de_at, phrase.de["dat"]))

    def to_place(self) -> Phrase:
        """to the station (zu, dative) or into the kitchen (in, accusative)."""
        place, phrase = self._place()
        if place.de_at == "in" and self.chance(0.4):
            return Phrase(f"into {phrase.en}", german.with_preposition("in", phrase.de["acc"]))
        return Phrase(f"to {phrase.en}", german.with_preposition("zu", phrase.de["dat"]))

    def to_city(self) -> Phrase:
        en, de = self.pair("cities")
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
        phrase = self.noun_phrase("things", "definite", plural=False, noun=self.pick(_FURNITURE))
        en, de = self.pair("positions")
        return Phrase(f"{en} {phrase.en}", german.with_preposition(de, phrase.de["dat"]))

    def clock(self) -> Phrase:
        """at seven o'clock, at half past seven (halb acht), at 14:30."""
        en, de = PAIRS["units"][hour := self.between(1, 12)]
        kind = self.option("clock")
        if kind == "full":
            return Phrase(f"at {en} o'clock", f"um {de} Uhr")
        if kind == "half":
            return Phrase(f"at half past {en}", f"um halb {PAIRS['units'][hour + 1][1] if hour < 12 else 'eins'}")
        time = f"{self.between(6, 23)}:{self.between(1, 11) * 5:02d}"
        return Phrase(f"at {time}", f"um {time} Uhr")

    def date(self) -> Phrase:
        """on 14 March 1987"""
        (en, de), day, year = self.pair("months"), self.between(1, 28), self.between(1950, 2019)
        return Phrase(f"on {day} {en} {year}", f"am {day}. {de} {year}")

    def time(self, tense: str) -> Phrase:
        """When, fitting the tense: present, past or future."""
        return self.when(self.option(f"time_{tense}"))

    def when(self, kind: str) -> Phrase:
        """A time of a kind that the grammar names."""
        if kind in ("today", "yesterday", "tomorrow"):
            return {"today": TODAY, "yesterday": YESTERDAY, "tomorrow": TOMORROW}[kind]
        if kind in ("weekday", "day_and_hour"):
            en, de = self.pair("weekdays")
            hour = (f" {part}" for part in self.clock()) if kind == "day_and_hour" else ("", "")
            return Phrase(*(day + more for day, more in zip((f"on {en}", f"am {de}"), hour)))
        if kind in ("clock", "date"):
            return self.clock() if kind == "clock" else self.date()
        if kind == "month":
            en, de = self.pair("months")
            return Phrase(f"in {en}", f"im {de}")
        if kind == "daytime":
            return self.pair("daytimes")
        if kind == "year":
            year = self.between(1900, 2019)
            return Phrase(f"in {year}", f"im Jahr {year}")
        if kind in ("ago", "ahead"):  # two days ago, in seven weeks
            n, unit = number(self.between(2, 12)), self.pair("units_of_time")
            en, de = f"{n.en} {unit.en}", f"{n.de} {unit.de}"
            return Phrase(f"{en} ago", f"vor {de}") if kind == "ago" else Phrase(f"in {en}", f"in {de}")
        en, de = {"every": ("every", "jede"), "last": ("last", "letzte"), "next": ("next", "nächste")}[kind[:-5]]
        if self.chance(0.4):
            return Phrase(f"{en} week", f"{de} Woche")
        day = self.pair("weekdays")
        return Phrase(f"{en} {day.en}", f"{de}n {day.de}")
