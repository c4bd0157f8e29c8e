"""Draws the sentences of the demo corpus: each kind is one function that returns the English and the German words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fasttfm.data.demo import clause as say
from fasttfm.data.demo import lexicon, verbs
from fasttfm.data.demo.clause import Clause, NounPhrase, Phrase
from fasttfm.data.demo.german import SEIN
from fasttfm.data.demo.phrases import TODAY, TOMORROW, Phrases, digits, number

_REASONS = (("because", "weil"), ("although", "obwohl"))
_OCCASIONS = (("while", "während"),)
_PRESENT_OCCASIONS = (("if", "wenn"), ("as soon as", "sobald"), ("while", "während"))
_UNINTENDED = ("need", "lose", "forget", "love", "cry")
_MANNER_OF_RESTING = ("quietly", "alone")
_NOT_NEGATED = ("no ", "every ", "all ", "many ")
_BEGINNINGS = (
    ("the concert", "das Konzert", "begins", "beginnt"),
    ("the train", "der Zug", "leaves", "fährt"),
    ("the lesson", "der Unterricht", "begins", "beginnt"),
    ("the film", "der Film", "begins", "beginnt"),
    ("the party", "das Fest", "begins", "beginnt"),
    ("the journey", "die Reise", "begins", "beginnt"),
)


class Sentences:
    """An endless, reproducible source of sentence pairs."""

    def __init__(self, seed: int) -> None:
        self.draw = Phrases(seed)
        self._kinds: tuple[tuple[Callable[[], tuple[str, str]], float], ...] = (
            (self.statement, 34),
            (self.because, 11),
            (self.reported, 8),
            (self.purpose, 8),
            (self.relative, 9),
            (self.question, 9),
            (self.description, 7),
            (self.comparison, 4),
            (self.sequence, 7),
            (self.count, 6),
            (self.calendar, 4),
        )

    def next(self) -> tuple[str, str]:
        """English and German."""
        kind = self.draw.weighted(self._kinds)
        english, german = kind()
        mark = "?" if kind == self.question else "."
        return say.finish(english, mark), say.finish(german, mark)

    def action(self, tense: str | None = None, subject: NounPhrase | None = None, rich: bool = True) -> Clause:
        """A clause with a full verb. rich: perhaps with time, place, manner and negation."""
        draw = self.draw
        tense = tense or draw.weighted((("present", 5), ("past", 4), ("perfect", 2), ("future", 2), ("modal", 3)))
        negative = rich and tense != "modal" and draw.chance(0.13)
        subject = subject or draw.subject()
        negative = negative and not subject.en.startswith(_NOT_NEGATED)
        clause = Clause(subject, verbs.INTRANSITIVE[0], tense, negative=negative)
        if tense == "modal":
            clause = replace(clause, modal=draw.pick(verbs.MODALS))
        kind = draw.weighted((("transitive", 10), ("dative", 2.5), ("ditransitive", 3), ("alone", 4), ("motion", 3)))
        clause = getattr(self, f"_{kind}")(clause)
        if not rich:
            return clause
        if draw.chance(0.3):
            clause = replace(clause, time=draw.time(self._time_tense(clause)))
            if tense == "perfect":
                clause = replace(clause, time=TODAY)
        elif tense in ("present", "past", "perfect") and not negative and not _denied(clause) and draw.chance(0.15):
            often = ("already", "schon") if tense == "perfect" else draw.pick(lexicon.FREQUENCY)
            clause = replace(clause, frequency=Phrase(*often))
        return clause

    def statement(self) -> tuple[str, str]:
        clause = self.action()
        if clause.time and self.draw.chance(0.4):
            bare = replace(clause, time=None)
            return f"{clause.time.en} {say.english(bare)}", say.german_main(bare, clause.time.de)
        return say.statement(clause)

    def because(self) -> tuple[str, str]:
        """A main and a subordinate clause, in either order."""
        draw = self.draw
        tense = draw.pick(("present", "past"))
        main = self.action(tense, rich=False)
        if draw.chance(0.7):
            en, de = draw.pick(_REASONS)
            side = self._state(tense, draw.subject()) if draw.chance(0.4) else self.action(tense)
        else:
            en, de = draw.pick(_PRESENT_OCCASIONS if tense == "present" else _OCCASIONS)
            side = self.action(tense, rich=False)
        if self.draw.chance(0.35):
            german = say.german_main(main, f"{de} {say.german_final(side)} ,")
            return f"{en} {say.english(side)} , {say.english(main)}", german
        german = f"{say.german_main(main)} , {de} {say.german_final(side)}"
        return f"{say.english(main)} {en} {say.english(side)}", german

    def reported(self) -> tuple[str, str]:
        """She says that …"""
        tense = self.draw.pick(("present", "past"))
        speaker = Clause(self.draw.subject(), self.draw.pick(verbs.REPORTING), tense)
        said = self.action() if tense == "present" else self.action("past")
        german = f"{say.german_main(speaker)} , dass {say.german_final(said)}"
        return f"{say.english(speaker)} that {say.english(said)}", german

    def purpose(self) -> tuple[str, str]:
        """He tries to …; he goes into the city in order to …"""
        tense = self.draw.pick(("present", "past"))
        if self.draw.chance(0.6):
            main, en, de = Clause(self.draw.subject(), self.draw.pick(verbs.WITH_INFINITIVE), tense), "", ""
        else:
            motion = Clause(self.draw.subject(), verbs.MOTION[0], tense)
            main, en, de = self._motion(motion), "in order", "um"
        goal = self.action("present", subject=main.subject, rich=False)
        while goal.verb.en in _UNINTENDED:
            goal = self.action("present", subject=main.subject, rich=False)
        german = f"{say.german_main(main)} , {de} {say.german_infinitive(goal)}"
        return f"{say.english(main)} {en} {say.english_infinitive(goal)}", german

    def relative(self) -> tuple[str, str]:
        """The man who …, the book which …"""
        draw = self.draw
        tense = draw.pick(("present", "past"))
        if draw.chance(0.5):
            person = draw.noun_phrase("persons", "definite")
            inner = self.action(draw.pick(("present", "past", "perfect")), subject=person, rich=False)
            main = self.action(tense, subject=say.with_relative(person, inner, "nom"), rich=False)
        else:
            verb, classes = draw.pick([entry for entry in verbs.TRANSITIVE if "things" in entry[1]])
            kind = draw.pick([kind for kind in classes if kind in ("things", "clothes")])
            thing = draw.noun_phrase(kind, "definite")
            other = draw.pick([entry[0] for entry in verbs.TRANSITIVE if kind in entry[1] and entry[0] is not verb])
            inner = Clause(draw.subject(), other, draw.pick(("present", "past", "perfect")))
            main = Clause(draw.subject(), verb, tense, accusative=say.with_relative(thing, inner, "acc"))
        return say.statement(main)

    def question(self) -> tuple[str, str]:
        draw = self.draw
        kind = draw.weighted((("plain", 4), ("where", 1.5), ("when", 1.5), ("why", 1.5), ("who", 2), ("what", 2)))
        clause = self.action(subject=draw.subject("definite"), rich=kind == "plain")
        if kind == "who":
            who = NounPhrase("who", {"nom": "wer"})
            clause = replace(self.action(subject=who), negative=False)
            return say.english(clause), f"wer {say.german_rest(clause)}"
        if kind == "what":
            verb, _ = draw.pick([entry for entry in verbs.TRANSITIVE if "things" in entry[1] or "foods" in entry[1]])
            clause = Clause(clause.subject, verb, draw.pick(("present", "past", "perfect", "future")))
        if kind == "where":
            verb = draw.pick([verb for verb in verbs.INTRANSITIVE if verb.en not in ("stay", "arrive")])
            clause = Clause(clause.subject, verb, draw.pick(("present", "past", "future")))
        english, german = say.english_question(clause), say.german_question(clause)
        if kind == "plain":
            return english, german
        asking = {"where": "wo", "when": "wann", "why": "warum", "what": "was"}[kind]
        return f"{kind} {english}", f"{asking} {german}"

    def description(self) -> tuple[str, str]:
        """The table is new; the cup is on the table; the girl is nine years old."""
        draw = self.draw
        tense = draw.weighted((("present", 3), ("past", 2)))
        kind = draw.weighted((("state", 3), ("where", 2), ("age", 1), ("thing", 2)))
        if kind == "state":
            clause = self._state(tense, draw.subject())
        elif kind == "age":
            years = number(draw.between(2, 99))
            age = Phrase(f"{years.en} years old", f"{years.de} Jahre alt")
            clause = Clause(draw.subject(), SEIN, tense, complement=age)
        elif kind == "where":
            small = draw.noun_phrase(draw.pick(("clothes", "animals")), "subject")
            clause = Clause(small, SEIN, tense, place=draw.beside_furniture())
        else:
            kinds = draw.pick(("things", "clothes", "animals", "foods", "places"))
            clause = self._state(tense, draw.noun_phrase(kinds, "subject"), kinds)
        return say.statement(clause)

    def comparison(self) -> tuple[str, str]:
        """older than, as old as, not as old as."""
        draw = self.draw
        kind = draw.pick(("persons", "things", "places", "animals", "clothes"))
        left, right = (draw.noun_phrase(kind, "definite") for _ in range(2))
        adjective = draw.adjective(kind, f"{left.en} {right.en}", comparable=True)
        degree = draw.weighted((("more", 3), ("same", 1), ("less", 1)))
        if degree == "more":
            phrase = Phrase(
                f"{adjective.en_comparative} than {right.en}", f"{adjective.de_comparative} als {right.de['nom']}"
            )
        else:
            phrase = Phrase(f"as {adjective.en} as {right.en}", f"so {adjective.de} wie {right.de['nom']}")
        tense = draw.weighted((("present", 3), ("past", 1)))
        clause = Clause(left, SEIN, tense, complement=phrase, negative=degree == "less")
        return say.statement(clause)

    def sequence(self) -> tuple[str, str]:
        """… and …; …, but …; two subjects."""
        draw = self.draw
        tense = draw.pick(("present", "past"))
        kind = draw.pick(("and", "but", "together"))
        if kind == "together":
            pair = say.both(draw.person(), draw.person())
            clause = self.action(tense, subject=pair, rich=draw.chance(0.5))
            return say.statement(clause)
        first = self.action(tense, rich=False)
        if kind == "and":
            second = self.action(tense, subject=first.subject, rich=False)
            german = f"{say.german_main(first)} und {say.german_rest(second)}"
            return f"{say.english(first)} and {say.english_rest(second)}", german
        second = self.action(tense, rich=False)
        german = f"{say.german_main(first)} , aber {say.german_main(second)}"
        return f"{say.english(first)} , but {say.english(second)}", german

    def count(self) -> tuple[str, str]:
        """Amounts and prices, in words and in digits."""
        draw = self.draw
        kind = draw.pick(("buy", "there", "price"))
        if kind == "price":
            thing = draw.noun_phrase(draw.pick(("things", "clothes", "foods")), "definite", plural=False)
            euros, cents = draw.between(2, 999), draw.between(1, 19) * 5
            price = digits(euros)
            if draw.chance(0.5):
                price = Phrase(f"{euros}.{cents:02d}", f"{euros},{cents:02d}")
            return f"{thing.en} costs {price.en} euros", f"{thing.de['nom']} kostet {price.de} Euro"
        amount = draw.amount(draw.pick(("things", "clothes", "animals", "foods")), large=draw.chance(0.4))
        if kind == "there":
            place = draw.at_place()
            return f"there are {amount.en} {place.en}", f"{place.de} gibt es {amount.de['acc']}"
        verb = draw.pick([entry[0] for entry in verbs.TRANSITIVE[:4]])
        tense = draw.pick(("present", "past", "perfect", "future"))
        clause = Clause(draw.subject(), verb, tense, accusative=amount)
        return say.statement(clause)

    def calendar(self) -> tuple[str, str]:
        """Birthdays and beginnings."""
        draw = self.draw
        if draw.chance(0.5):
            person, date = draw.person("definite"), draw.date()
            were, wurde = ("was", "wurde") if person.person == "3s" else ("were", "wurden")
            return f"{person.en} {were} born {date.en}", f"{person.de['nom']} {wurde} {date.de} geboren"
        what_en, what_de, verb_en, verb_de = draw.pick(_BEGINNINGS)
        end = "ab" if verb_de == "fährt" else ""
        day = draw.weighted(((draw.weekday, 3), (draw.date, 1), (lambda: TODAY, 1), (lambda: TOMORROW, 1)))()
        hour = draw.clock()
        return f"{what_en} {verb_en} {day.en} {hour.en}", f"{what_de} {verb_de} {day.de} {hour.de} {end}"

    def _state(self, tense: str, subject: NounPhrase, kind: str = "persons") -> Clause:
        """Somebody is tired, the table is new."""
        adjective = self.draw.adjective(kind, subject.en)
        negative = self.draw.chance(0.2) and not subject.en.startswith(_NOT_NEGATED)
        return Clause(subject, SEIN, tense, complement=Phrase(adjective.en, adjective.de), negative=negative)

    def _transitive(self, clause: Clause) -> Clause:
        draw = self.draw
        verb, classes = draw.pick(verbs.TRANSITIVE)
        kind = draw.pick(classes)
        if kind == "persons" and draw.chance(0.35):
            accusative = draw.pronoun(other_than=clause.subject)
        elif kind == "persons":
            accusative = draw.person(_object_role(clause))
        elif clause.tense != "modal" and not clause.negative and draw.chance(0.07):
            accusative = draw.noun_phrase(kind, "denied")
        else:
            owned = kind == "openings" and draw.chance(0.5)
            accusative = draw.noun_phrase(kind, _object_role(clause), possessive=not owned)
            accusative = say.of(accusative, draw.the("places")) if owned else accusative
        clause = replace(clause, verb=verb, accusative=accusative)
        if clause.negative or not draw.chance(0.35):
            return clause
        way = draw.weighted((("place", 3), ("manner", 2), ("company", 1), ("for", 1)))
        goods = kind in ("things", "clothes", "foods")
        if way == "manner" and (goods or kind == "openings"):
            several = clause.subject.person.endswith("p")
            manners = [entry for entry in lexicon.MANNER if several or entry[0] != "together"]
            return replace(clause, manner=Phrase(*draw.pick(manners)))
        if way == "for" and goods:
            return replace(clause, place=draw.beneficiary())
        if way == "company" or kind == "places":
            return replace(clause, place=draw.company())
        return replace(clause, place=draw.at_place())

    def _dative(self, clause: Clause) -> Clause:
        draw = self.draw
        person = draw.pronoun(other_than=clause.subject) if draw.chance(0.3) else draw.person(_object_role(clause))
        return replace(clause, verb=draw.pick(verbs.DATIVE), dative=person)

    def _ditransitive(self, clause: Clause) -> Clause:
        draw = self.draw
        pronoun = draw.chance(0.35)
        return replace(
            clause,
            verb=draw.pick(verbs.DITRANSITIVE),
            dative=draw.pronoun(other_than=clause.subject) if pronoun else draw.person(_object_role(clause)),
            accusative=draw.noun_phrase(draw.pick(("things", "clothes", "foods")), _object_role(clause)),
            dative_with_to=not pronoun and draw.chance(0.5),
        )

    def _alone(self, clause: Clause) -> Clause:
        draw = self.draw
        clause = replace(clause, verb=draw.pick(verbs.INTRANSITIVE))
        way = draw.weighted((("place", 4), ("manner", 1.5), ("company", 1.5), ("bare", 3)))
        if way == "manner":
            manners = [entry for entry in lexicon.MANNER if entry[0] in _MANNER_OF_RESTING]
            return replace(clause, manner=Phrase(*draw.pick(manners)))
        if way == "bare":
            return clause
        return replace(clause, place=draw.at_place() if way == "place" else draw.company())

    def _motion(self, clause: Clause) -> Clause:
        if self.draw.chance(0.3):
            return replace(clause, verb=self.draw.pick(verbs.JOURNEY), place=self.draw.to_city())
        return replace(clause, verb=self.draw.pick(verbs.MOTION), place=self.draw.to_place())

    @staticmethod
    def _time_tense(clause: Clause) -> str:
        if clause.tense == "modal":
            return "past" if clause.modal and clause.modal[0][0] == "had to" else "future"
        return "present" if clause.tense == "perfect" else clause.tense


def _object_role(clause: Clause) -> str:
    return "definite" if clause.negative else "object"


def _denied(clause: Clause) -> bool:
    return any(part is not None and part.en.startswith("no ") for part in (clause.subject, clause.accusative))
