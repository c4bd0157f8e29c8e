"""Draws the sentences of the demo corpus: each kind is one method that returns the English and the German words.

What grammar.yaml has as a phrase is drawn by its name; the rest, and whole sentences, are methods.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fasttfm.data.demo import clause as say
from fasttfm.data.demo import words
from fasttfm.data.demo.clause import Clause, NounPhrase, Phrase, assemble

T = TypeVar("T")
_OPPOSITES = [set(group.split()) for group in words.GRAMMAR["opposites"]]
_RELATIONS = [noun for noun in words.NOUNS["persons"] if noun.en in words.LISTS["relations"]]
_FURNITURE = [
    n for n in words.NOUNS["things"] + words.COMPOUNDS["things"] if n.en.split()[-1] in words.LISTS["furniture"]
]
_NOT_NEGATED = ("no ", "every ", "all ", "many ")
_TENSES = ("present", "past", "perfect", "future")
_GOODS = ("things", "clothes", "foods")


def number(n: int) -> Phrase:
    """2 to 99 in words; German says the unit first: einundzwanzig."""
    if n < 20:
        return Phrase(*words.PAIRS["units"][n])
    (tens_en, tens_de), (unit_en, unit_de) = words.PAIRS["tens"][n // 10], words.PAIRS["units"][n % 10]
    return Phrase(tens_en, tens_de) if n % 10 == 0 else Phrase(f"{tens_en}-{unit_en}", f"{unit_de}und{tens_de}")


def digits(n: int) -> Phrase:
    """In digits; thousands are parted by a comma in English and a full stop in German."""
    return Phrase(f"{n:,}", f"{n:,}".replace(",", "."))


class Phrases:
    """Draws from one generator. Only random.random() is used, whose sequence Python keeps across versions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def option(self, name: str) -> str:
        """One of the options that the grammar weighs under this name."""
        weights = words.GRAMMAR["weights"][name]
        place = self._random.random() * sum(weights.values())
        for option, weight in weights.items():
            place -= weight
            if place < 0:
                return option
        return list(weights)[-1]

    def draw(self, name: str) -> Any:
        """Draw what has this name: a method, a pair of words, a number from a range, or a phrase made of such."""
        if hasattr(self, name):
            return getattr(self, name)()
        if name in words.PAIRS:
            return Phrase(*self.pick(words.PAIRS[name]))
        if name in words.GRAMMAR["ranges"]:
            return self.between(*words.GRAMMAR["ranges"][name])
        parts, en, de = words.GRAMMAR["phrases"][name]
        drawn = [self.draw(part) for part in parts.split()]
        return Phrase(en.format(*drawn), de.format(*drawn))

    def adjective(self, kind: str, said: str, comparable: bool = False) -> words.Adjective:
        """One that neither repeats nor contradicts what is said already, in English."""
        ruled_out = set(said.split()).union(*(group for group in _OPPOSITES if group & set(said.split())))
        suiting = words.ADJECTIVES.get(kind, words.ADJECTIVES["things"])
        return self.pick([a for a in suiting if a.en not in ruled_out and (a.en_comparative or not comparable)])

    def noun(self, kind: str) -> words.Noun:
        return self.pick(words.COMPOUNDS[kind] if words.COMPOUNDS[kind] and self.chance(0.3) else words.NOUNS[kind])

    def noun_phrase(
        self,
        kind: str,
        role: str = "object",
        *,
        plural: bool | None = None,
        noun: words.Noun | None = None,
        possessive: bool = True,
    ) -> NounPhrase:
        """Determiner, perhaps adjectives, noun.

        role: "subject", "object", "definite" (an object that "nicht" can negate) or "denied" (no book, kein Buch).
        possessive: whether it may be "my book"; not where "of the baker" follows.
        """
        noun = noun or self.noun(kind)
        plural = self.chance(0.25) if plural is None else plural
        if possessive and role != "denied" and self.chance(0.2):
            pronoun = self.pick(words.PRONOUNS)
            determiner = f"{pronoun[2]} {pronoun[6]}"
        else:
            determiner = self.option(role + "_plural" * plural)
        adjectives: list[words.Adjective] = []
        for _ in range(int(self.option("adjectives"))):
            adjectives.append(self.adjective(kind, " ".join(adjective.en for adjective in adjectives)))
        return assemble(determiner, adjectives, noun, plural)

    def the(self, kind: str) -> NounPhrase:
        """The plain definite singular."""
        return assemble("the d", [], self.noun(kind), plural=False)

    def person(self, role: str = "object") -> NounPhrase:
        """Somebody, not a pronoun: a noun, a name, Mr Fischer, the friend of the baker."""
        kind = self.option("person")
        if kind in ("name", "title"):
            name = self.pick(words.LISTS["names" if kind == "name" else "surnames"])
            row: tuple[str, ...] = (name, name, name, "f" if name.endswith("a") else "m")
            if kind == "title":
                titles = ("Mr", "Herr", "Herrn", "m") if self.chance(0.5) else ("Mrs", "Frau", "Frau", "f")
                row = (*(f"{title} {name}" for title in titles[:3]), titles[3])
            en, de, others, gender = row
            return NounPhrase(en, {"nom": de, "acc": others, "dat": others}, gender=gender, early=True)
        if kind == "of":
            relation = self.noun_phrase("persons", role, noun=self.pick(_RELATIONS), possessive=False)
            return say.of(relation, self.the("persons"))
        return self.noun_phrase("persons", role)

    def subject(self, role: str = "subject") -> NounPhrase:
        """Draw the subject: a pronoun, or a person."""
        return self.pronoun() if self.chance(0.3) else self.person(role)

    def pronoun(self, other_than: NounPhrase | None = None) -> NounPhrase:
        """A personal pronoun that does not overlap with other_than: neither "I ask me" nor "we ask me"."""
        while True:
            en, en_object, _, nom, acc, dat, _, person = self.pick(words.PRONOUNS)
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

    def guest(self) -> NounPhrase:
        """A person whom "nicht" can negate."""
        return self.person("definite")

    def few(self) -> Phrase:
        return number(self.between(2, 12))

    def age(self) -> Phrase:
        return number(self.between(2, 99))

    def furniture(self) -> NounPhrase:
        return self.noun_phrase("things", "definite", plural=False, noun=self.pick(_FURNITURE))

    def company(self) -> Phrase:
        """with the dog, without the aunt."""
        phrase = self.noun_phrase(self.pick(("persons", "animals")), "definite")
        en, de, case = self.pick((("with", "mit", "dat"), ("without", "ohne", "acc")))
        return Phrase(f"{en} {phrase.en}", f"{de} {phrase.de[case]}")

    def _place(self) -> tuple[str, str, NounPhrase]:
        noun, en, de = self.pick(words.PLACES)
        return en, de, self.noun_phrase("places", "definite", plural=False, noun=noun)

    def at_place(self) -> Phrase:
        """in the kitchen, at the station, in Berlin."""
        if self.chance(0.15):
            return self.draw("in_city")
        en, de, phrase = self._place()
        return Phrase(f"{en} {phrase.en}", f"{de} {phrase.de['dat']}")

    def to_place(self) -> Phrase:
        """to the station (zu, dative) or into the kitchen (in, accusative)."""
        _, de, phrase = self._place()
        if de == "in" and self.chance(0.4):
            return Phrase(f"into {phrase.en}", f"in {phrase.de['acc']}")
        return Phrase(f"to {phrase.en}", f"zu {phrase.de['dat']}")

    def clock(self) -> Phrase:
        """at seven o'clock, at half past seven (halb acht), at 14:30."""
        hour, kind = self.between(1, 12), self.option("clock")
        if kind == "digital":
            time = f"{self.between(6, 23)}:{self.between(1, 11) * 5:02d}"
            return Phrase(f"at {time}", f"um {time} Uhr")
        (en, de), (_, after) = words.PAIRS["units"][hour], words.PAIRS["units"][hour + 1]
        if kind == "full":
            return Phrase(f"at {en} o'clock", f"um {de} Uhr")
        return Phrase(f"at half past {en}", f"um halb {after if hour < 12 else 'eins'}")

    def week_or_day(self) -> Phrase:
        return Phrase("week", " Woche") if self.chance(0.4) else self.draw("days_of_weeks")


class Sentences(Phrases):
    """An endless, reproducible source of sentence pairs."""

    def next(self) -> Phrase:
        """English and German."""
        kind = self.option("kind")
        mark = "?" if kind == "question" else "."
        return Phrase(*(say.finish(text, mark) for text in getattr(self, kind)()))

    def action(self, tense: str | None = None, subject: NounPhrase | None = None, rich: bool = True) -> Clause:
        """A clause with a full verb. rich: perhaps with time, place, manner and negation."""
        tense = tense or self.option("tense")
        negative = rich and tense != "modal" and self.chance(0.13)
        subject = subject or self.subject()
        negative = negative and not subject.en.startswith(_NOT_NEGATED)
        modal = self.pick(words.MODALS) if tense == "modal" else ()
        clause = Clause(subject, words.SEIN, tense, modal, negative=negative)
        clause = getattr(self, f"_{self.option('action')}")(clause)
        if not rich:
            return clause
        if self.chance(0.3):
            told = {"perfect": "present", "modal": "past" if modal and modal[0] == "had to" else "future"}
            time = self.draw(self.option(f"time_{told.get(tense, tense)}"))
            return replace(clause, time=self.draw("today") if tense == "perfect" else time)
        if tense in _TENSES[:3] and not negative and not _denied(clause) and self.chance(0.15):
            often = Phrase("already", "schon") if tense == "perfect" else self.draw("frequency")
            clause = replace(clause, frequency=often)
        return clause

    def statement(self) -> Phrase:
        clause = self.action()
        if clause.time and self.chance(0.4):
            bare = replace(clause, time=None)
            return Phrase(f"{clause.time.en} {say.english(bare)}", say.german(bare, front=clause.time.de))
        return say.statement(clause)

    def because(self) -> Phrase:
        """A main and a subordinate clause, in either order."""
        tense = self.pick(_TENSES[:2])
        main = self.action(tense, rich=False)
        if self.chance(0.7):
            en, de = self.draw("reasons")
            side = self._state(tense, self.subject()) if self.chance(0.4) else self.action(tense)
        else:
            en, de = self.draw("present_occasions" if tense == "present" else "occasions")
            side = self.action(tense, rich=False)
        if self.chance(0.35):
            german = say.german(main, front=f"{de} {say.german(side, 'final')} ,")
            return Phrase(f"{en} {say.english(side)} , {say.english(main)}", german)
        german = f"{say.german(main)} , {de} {say.german(side, 'final')}"
        return Phrase(f"{say.english(main)} {en} {say.english(side)}", german)

    def reported(self) -> Phrase:
        """She says that …"""
        tense = self.pick(_TENSES[:2])
        speaker = Clause(self.subject(), self.pick(words.VERBS["reporting"]), tense)
        said = self.action() if tense == "present" else self.action("past")
        german = f"{say.german(speaker)} , dass {say.german(said, 'final')}"
        return Phrase(f"{say.english(speaker)} that {say.english(said)}", german)

    def purpose(self) -> Phrase:
        """He tries to …; he goes into the city in order to …"""
        tense = self.pick(_TENSES[:2])
        if self.chance(0.6):
            main, en, de = Clause(self.subject(), self.pick(words.VERBS["with_infinitive"]), tense), "", ""
        else:
            main, en, de = self._motion(Clause(self.subject(), words.SEIN, tense)), "in order", "um"
        goal = self.action("present", subject=main.subject, rich=False)
        while goal.verb.en in words.LISTS["unintended"]:
            goal = self.action("present", subject=main.subject, rich=False)
        german = f"{say.german(main)} , {de} {say.german(goal, 'infinitive')}"
        return Phrase(f"{say.english(main)} {en} {say.english(goal, 'infinitive')}", german)

    def relative(self) -> Phrase:
        """The man who …, the book which …"""
        tense = self.pick(_TENSES[:2])
        if self.chance(0.5):
            person = self.noun_phrase("persons", "definite")
            inner = self.action(self.pick(_TENSES[:3]), subject=person, rich=False)
            return say.statement(self.action(tense, subject=say.with_relative(person, inner, "nom"), rich=False))
        verb, kinds = self.pick([entry for entry in words.TRANSITIVE if "things" in entry[1]])
        kind = self.pick([kind for kind in kinds if kind in ("things", "clothes")])
        thing = self.noun_phrase(kind, "definite")
        other = self.pick([entry[0] for entry in words.TRANSITIVE if kind in entry[1] and entry[0] is not verb])
        inner = Clause(self.subject(), other, self.pick(_TENSES[:3]))
        return say.statement(Clause(self.subject(), verb, tense, accusative=say.with_relative(thing, inner, "acc")))

    def question(self) -> Phrase:
        kind = self.option("asked")
        clause = self.action(subject=self.subject("definite"), rich=kind == "plain")
        if kind == "who":
            clause = replace(self.action(subject=NounPhrase("who", {"nom": "wer"})), negative=False)
            return say.statement(clause)
        if kind == "what":
            verb, _ = self.pick([entry for entry in words.TRANSITIVE if {"things", "foods"} & {*entry[1]}])
            clause = Clause(clause.subject, verb, self.pick(_TENSES))
        if kind == "where":
            verb = self.pick([verb for verb in words.VERBS["intransitive"] if verb.en not in ("stay", "arrive")])
            clause = Clause(clause.subject, verb, self.pick(("present", "past", "future")))
        asking = {"where": "wo", "when": "wann", "why": "warum", "what": "was"}
        en, de = (kind, asking[kind]) if kind in asking else ("", "")
        return Phrase(f"{en} {say.english(clause, 'question')}", f"{de} {say.german(clause, 'question')}")

    def description(self) -> Phrase:
        """The table is new; the cup is on the table; the girl is nine years old."""
        tense, kind = self.option("described_in"), self.option("described")
        if kind == "state":
            return say.statement(self._state(tense, self.subject()))
        if kind == "age":
            age = self.draw("years_old")
            return say.statement(Clause(self.subject(), words.SEIN, tense, complement=age))
        if kind == "where":
            small = self.noun_phrase(self.pick(("clothes", "animals")), "subject")
            return say.statement(Clause(small, words.SEIN, tense, place=self.draw("beside_furniture")))
        kind = self.pick(("things", "clothes", "animals", "foods", "places"))
        return say.statement(self._state(tense, self.noun_phrase(kind, "subject"), kind))

    def comparison(self) -> Phrase:
        """older than, as old as, not as old as."""
        kind = self.pick(("persons", "things", "places", "animals", "clothes"))
        left, right = (self.noun_phrase(kind, "definite") for _ in range(2))
        adjective = self.adjective(kind, f"{left.en} {right.en}", comparable=True)
        degree = self.option("degree")
        en, de = f"as {adjective.en} as", f"so {adjective.de} wie"
        if degree == "more":
            en, de = f"{adjective.en_comparative} than", f"{adjective.de_comparative} als"
        phrase = Phrase(f"{en} {right.en}", f"{de} {right.de['nom']}")
        tense = self.option("compared_in")
        return say.statement(Clause(left, words.SEIN, tense, complement=phrase, negative=degree == "less"))

    def sequence(self) -> Phrase:
        """… and …; …, but …; two subjects."""
        tense = self.pick(_TENSES[:2])
        kind = self.pick(("and", "but", "together"))
        if kind == "together":
            pair = say.both(self.person(), self.person())
            return say.statement(self.action(tense, subject=pair, rich=self.chance(0.5)))
        first = self.action(tense, rich=False)
        en, de = say.statement(first)
        if kind == "and":
            second = self.action(tense, subject=first.subject, rich=False)
            return Phrase(f"{en} and {say.english(second, 'rest')}", f"{de} und {say.german(second, 'rest')}")
        second = self.action(tense, rich=False)
        return Phrase(f"{en} , but {say.english(second)}", f"{de} , aber {say.german(second)}")

    def count(self) -> Phrase:
        """Amounts and prices, in words and in digits."""
        kind = self.pick(("buy", "there", "price"))
        if kind == "price":
            thing = self.noun_phrase(self.pick(_GOODS), "definite", plural=False)
            euros, cents = self.between(2, 999), self.between(1, 19) * 5
            price = Phrase(f"{euros}.{cents:02d}", f"{euros},{cents:02d}") if self.chance(0.5) else digits(euros)
            return Phrase(f"{thing.en} costs {price.en} euros", f"{thing.de['nom']} kostet {price.de} Euro")
        amount = self.amount(self.pick(("things", "clothes", "animals", "foods")), large=self.chance(0.4))
        if kind == "there":
            place = self.at_place()
            return Phrase(f"there are {amount.en} {place.en}", f"{place.de} gibt es {amount.de['acc']}")
        verb, tense = self.pick(words.TRANSITIVE[:4])[0], self.pick(_TENSES)
        return say.statement(Clause(self.subject(), verb, tense, accusative=amount))

    def calendar(self) -> Phrase:
        """Birthdays and beginnings."""
        if self.chance(0.5):
            person, date = self.guest(), self.draw("date")
            were, wurde = ("was", "wurde") if person.person == "3s" else ("were", "wurden")
            return Phrase(f"{person.en} {were} born {date.en}", f"{person.de['nom']} {wurde} {date.de} geboren")
        what_en, what_de, verb_en, verb_de = self.pick(words.BEGINNINGS)
        end = "ab" if verb_de == "fährt" else ""
        day, hour = self.draw(self.option("day")), self.clock()
        return Phrase(f"{what_en} {verb_en} {day.en} {hour.en}", f"{what_de} {verb_de} {day.de} {hour.de} {end}")

    def _state(self, tense: str, subject: NounPhrase, kind: str = "persons") -> Clause:
        """Somebody is tired, the table is new."""
        adjective = self.adjective(kind, subject.en)
        negative = self.chance(0.2) and not subject.en.startswith(_NOT_NEGATED)
        return Clause(subject, words.SEIN, tense, complement=Phrase(adjective.en, adjective.de), negative=negative)

    def _transitive(self, clause: Clause) -> Clause:
        verb, kinds = self.pick(words.TRANSITIVE)
        kind = self.pick(kinds)
        if kind == "persons" and self.chance(0.35):
            accusative = self.pronoun(other_than=clause.subject)
        elif kind == "persons":
            accusative = self.person(_object_role(clause))
        elif clause.tense != "modal" and not clause.negative and self.chance(0.07):
            accusative = self.noun_phrase(kind, "denied")
        else:
            owned = kind == "openings" and self.chance(0.5)
            accusative = self.noun_phrase(kind, _object_role(clause), possessive=not owned)
            accusative = say.of(accusative, self.the("places")) if owned else accusative
        clause = replace(clause, verb=verb, accusative=accusative)
        if clause.negative or not self.chance(0.35):
            return clause
        way = self.option("object_with")
        if way == "manner" and kind in (*_GOODS, "openings"):
            several = clause.subject.person.endswith("p")
            manners = [entry for entry in words.PAIRS["manner"] if several or entry[0] != "together"]
            return replace(clause, manner=Phrase(*self.pick(manners)))
        if way == "for" and kind in _GOODS:
            return replace(clause, place=self.draw("for_guest"))
        return replace(clause, place=self.company() if way == "company" or kind == "places" else self.at_place())

    def _dative(self, clause: Clause) -> Clause:
        person = self.pronoun(other_than=clause.subject) if self.chance(0.3) else self.person(_object_role(clause))
        return replace(clause, verb=self.pick(words.VERBS["dative"]), dative=person)

    def _ditransitive(self, clause: Clause) -> Clause:
        pronoun = self.chance(0.35)
        return replace(
            clause,
            verb=self.pick(words.VERBS["ditransitive"]),
            dative=self.pronoun(other_than=clause.subject) if pronoun else self.person(_object_role(clause)),
            accusative=self.noun_phrase(self.pick(_GOODS), _object_role(clause)),
            dative_with_to=not pronoun and self.chance(0.5),
        )

    def _alone(self, clause: Clause) -> Clause:
        clause = replace(clause, verb=self.pick(words.VERBS["intransitive"]))
        way = self.option("alone_with")
        if way == "manner":
            manners = [entry for entry in words.PAIRS["manner"] if entry[0] in words.LISTS["manner_of_resting"]]
            return replace(clause, manner=Phrase(*self.pick(manners)))
        if way == "bare":
            return clause
        return replace(clause, place=self.at_place() if way == "place" else self.company())

    def _motion(self, clause: Clause) -> Clause:
        if self.chance(0.3):
            return replace(clause, verb=self.pick(words.VERBS["journey"]), place=self.draw("to_city"))
        return replace(clause, verb=self.pick(words.VERBS["motion"]), place=self.to_place())


def _object_role(clause: Clause) -> str:
    return "definite" if clause.negative else "object"


def _denied(clause: Clause) -> bool:
    return any(part is not None and part.en.startswith("no ") for part in (clause.subject, clause.accusative))
