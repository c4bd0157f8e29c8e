"""Draws the sentences of the demo corpus: each kind is one method that returns the English and the German words."""

from __future__ import annotations

from dataclasses import replace

from fasttfm.data.demo import clause as say
from fasttfm.data.demo.clause import Clause, NounPhrase, Phrase
from fasttfm.data.demo.draw import TODAY, Phrases, digits, number
from fasttfm.data.demo.german import SEIN
from fasttfm.data.demo.words import BEGINNINGS, LISTS, MODALS, PAIRS, TRANSITIVE, VERBS

_NOT_NEGATED = ("no ", "every ", "all ", "many ")
_TENSES = ("present", "past", "perfect", "future")
_GOODS = ("things", "clothes", "foods")


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
        modal = self.pick(MODALS) if tense == "modal" else ()
        clause = Clause(subject, SEIN, tense, modal, negative=negative)
        clause = getattr(self, f"_{self.option('action')}")(clause)
        if not rich:
            return clause
        if self.chance(0.3):
            clause = replace(clause, time=self.time(self._time_tense(clause)))
            return replace(clause, time=TODAY) if tense == "perfect" else clause
        if tense in _TENSES[:3] and not negative and not _denied(clause) and self.chance(0.15):
            often = Phrase("already", "schon") if tense == "perfect" else self.pair("frequency")
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
            en, de = self.pair("reasons")
            side = self._state(tense, self.subject()) if self.chance(0.4) else self.action(tense)
        else:
            en, de = self.pair("present_occasions" if tense == "present" else "occasions")
            side = self.action(tense, rich=False)
        if self.chance(0.35):
            german = say.german(main, front=f"{de} {say.german(side, 'final')} ,")
            return Phrase(f"{en} {say.english(side)} , {say.english(main)}", german)
        german = f"{say.german(main)} , {de} {say.german(side, 'final')}"
        return Phrase(f"{say.english(main)} {en} {say.english(side)}", german)

    def reported(self) -> Phrase:
        """She says that …"""
        tense = self.pick(_TENSES[:2])
        speaker = Clause(self.subject(), self.pick(VERBS["reporting"]), tense)
        said = self.action() if tense == "present" else self.action("past")
        german = f"{say.german(speaker)} , dass {say.german(said, 'final')}"
        return Phrase(f"{say.english(speaker)} that {say.english(said)}", german)

    def purpose(self) -> Phrase:
        """He tries to …; he goes into the city in order to …"""
        tense = self.pick(_TENSES[:2])
        if self.chance(0.6):
            main, en, de = Clause(self.subject(), self.pick(VERBS["with_infinitive"]), tense), "", ""
        else:
            main, en, de = self._motion(Clause(self.subject(), SEIN, tense)), "in order", "um"
        goal = self.action("present", subject=main.subject, rich=False)
        while goal.verb.en in LISTS["unintended"]:
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
        verb, kinds = self.pick([entry for entry in TRANSITIVE if "things" in entry[1]])
        kind = self.pick([kind for kind in kinds if kind in ("things", "clothes")])
        thing = self.noun_phrase(kind, "definite")
        other = self.pick([entry[0] for entry in TRANSITIVE if kind in entry[1] and entry[0] is not verb])
        inner = Clause(self.subject(), other, self.pick(_TENSES[:3]))
        return say.statement(Clause(self.subject(), verb, tense, accusative=say.with_relative(thing, inner, "acc")))

    def question(self) -> Phrase:
        kind = self.option("asked")
        clause = self.action(subject=self.subject("definite"), rich=kind == "plain")
        if kind == "who":
            clause = replace(self.action(subject=NounPhrase("who", {"nom": "wer"})), negative=False)
            return say.statement(clause)
        if kind == "what":
            verb, _ = self.pick([entry for entry in TRANSITIVE if {"things", "foods"} & {*entry[1]}])
            clause = Clause(clause.subject, verb, self.pick(_TENSES))
        if kind == "where":
            verb = self.pick([verb for verb in VERBS["intransitive"] if verb.en not in ("stay", "arrive")])
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
            years = number(self.between(2, 99))
            age = Phrase(f"{years.en} years old", f"{years.de} Jahre alt")
            return say.statement(Clause(self.subject(), SEIN, tense, complement=age))
        if kind == "where":
            small = self.noun_phrase(self.pick(("clothes", "animals")), "subject")
            return say.statement(Clause(small, SEIN, tense, place=self.beside_furniture()))
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
        return say.statement(Clause(left, SEIN, tense, complement=phrase, negative=degree == "less"))

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
        verb, tense = self.pick(TRANSITIVE[:4])[0], self.pick(_TENSES)
        return say.statement(Clause(self.subject(), verb, tense, accusative=amount))

    def calendar(self) -> Phrase:
        """Birthdays and beginnings."""
        if self.chance(0.5):
            person, date = self.person("definite"), self.date()
            were, wurde = ("was", "wurde") if person.person == "3s" else ("were", "wurden")
            return Phrase(f"{person.en} {were} born {date.en}", f"{person.de['nom']} {wurde} {date.de} geboren")
        what_en, what_de, verb_en, verb_de = self.pick(BEGINNINGS)
        end = "ab" if verb_de == "fährt" else ""
        day, hour = self.when(self.option("day")), self.clock()
        return Phrase(f"{what_en} {verb_en} {day.en} {hour.en}", f"{what_de} {verb_de} {day.de} {hour.de} {end}")

    def _state(self, tense: str, subject: NounPhrase, kind: str = "persons") -> Clause:
        """Somebody is tired, the table is new."""
        adjective = self.adjective(kind, subject.en)
        negative = self.chance(0.2) and not subject.en.startswith(_NOT_NEGATED)
        return Clause(subject, SEIN, tense, complement=Phrase(adjective.en, adjective.de), negative=negative)

    def _transitive(self, clause: Clause) -> Clause:
        verb, kinds = self.pick(TRANSITIVE)
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
            manners = [entry for entry in PAIRS["manner"] if several or entry[0] != "together"]
            return replace(clause, manner=Phrase(*self.pick(manners)))
        if way == "for" and kind in _GOODS:
            return replace(clause, place=self.beneficiary())
        return replace(clause, place=self.company() if way == "company" or kind == "places" else self.at_place())

    def _dative(self, clause: Clause) -> Clause:
        person = self.pronoun(other_than=clause.subject) if self.chance(0.3) else self.person(_object_role(clause))
        return replace(clause, verb=self.pick(VERBS["dative"]), dative=person)

    def _ditransitive(self, clause: Clause) -> Clause:
        pronoun = self.chance(0.35)
        return replace(
            clause,
            verb=self.pick(VERBS["ditransitive"]),
            dative=self.pronoun(other_than=clause.subject) if pronoun else self.person(_object_role(clause)),
            accusative=self.noun_phrase(self.pick(_GOODS), _object_role(clause)),
            dative_with_to=not pronoun and self.chance(0.5),
        )

    def _alone(self, clause: Clause) -> Clause:
        clause = replace(clause, verb=self.pick(VERBS["intransitive"]))
        way = self.option("alone_with")
        if way == "manner":
            manners = [entry for entry in PAIRS["manner"] if entry[0] in LISTS["manner_of_resting"]]
            return replace(clause, manner=Phrase(*self.pick(manners)))
        if way == "bare":
            return clause
        return replace(clause, place=self.at_place() if way == "place" else self.company())

    def _motion(self, clause: Clause) -> Clause:
        if self.chance(0.3):
            return replace(clause, verb=self.pick(VERBS["journey"]), place=self.to_city())
        return replace(clause, verb=self.pick(VERBS["motion"]), place=self.to_place())

    @staticmethod
    def _time_tense(clause: Clause) -> str:
        if clause.tense == "modal":
            return "past" if clause.modal[0] == "had to" else "future"
        return "present" if clause.tense == "perfect" else clause.tense


def _object_role(clause: Clause) -> str:
    return "definite" if clause.negative else "object"


def _denied(clause: Clause) -> bool:
    return any(part is not None and part.en.startswith("no ") for part in (clause.subject, clause.accusative))
