"""Sentences of the demo corpus: samples a clause and renders it in English and German.

German word order follows from the structure: finite verb second in a main clause, first in a question, last in a
subordinate clause; then pronouns, time, dative, accusative, "nicht" and place, in this order. Object pronouns precede a
subject that follows the verb, unless it is a pronoun too.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from fasttfm.data.demo import words
from fasttfm.data.demo.words import CASES, GRAMMAR, HABEN, NOUNS, PAIRS, PERSONS, SEIN, VERBS, WERDEN, Noun, Verb

T = TypeVar("T")


class Phrase(NamedTuple):
    """A fixed phrase in both languages."""

    en: str
    de: str


@dataclass(frozen=True)
class NounPhrase:
    """A noun phrase; de: case -> the declined phrase; gender: m, f, n, or p for every plural."""

    en: str
    de: dict[str, str]
    person: str = "3s"
    gender: str = "m"
    en_object: str = ""
    """English object form of a pronoun; empty for nouns."""


@dataclass(frozen=True)
class Clause:
    """The parts of a clause. modal: row of the modal verb, for tense "modal". predicate: complement of "be"."""

    subject: NounPhrase
    verb: Verb
    tense: str = "present"
    modal: Sequence[str] = ()
    negative: bool = False
    time: Phrase | None = None
    dative: NounPhrase | None = None
    accusative: NounPhrase | None = None
    place: Phrase | None = None
    predicate: Phrase | None = None


def assemble(determiner: Phrase, adjectives: Sequence[Sequence[str]], noun: Noun, plural: bool) -> NounPhrase:
    """A noun phrase. determiner: English article or numeral, and the German stem for declined()."""
    described = [*(each[0] for each in adjectives), noun.en_plural if plural else noun.en]
    article = "an" if determiner.en == "a" and described[0][0] in "aeiou" else determiner.en
    stems = [each[-1] for each in adjectives]
    cases = {case: words.declined(determiner.de, stems, noun, case, plural) for case in CASES}
    return NounPhrase(" ".join([article, *described]), cases, *(("3p", "p") if plural else ("3s", noun.gender)))


def number(n: int) -> Phrase:
    """2 to 99 in words; German puts the unit first: einundzwanzig."""
    if n < 20:
        return Phrase(*PAIRS["units"][n])
    (tens_en, tens_de), (unit_en, unit_de) = PAIRS["tens"][n // 10], PAIRS["units"][n % 10]
    return Phrase(tens_en, tens_de) if n % 10 == 0 else Phrase(f"{tens_en}-{unit_en}", f"{unit_de}und{tens_de}")


def english(clause: Clause, order: str = "statement") -> str:
    """The clause in English. order: statement, question, or rest (statement without its subject)."""
    verb, tense, person, particle = clause.verb, clause.tense, clause.subject.person, ""
    others = person != "3s"
    auxiliary, main = "", (verb.en_third, verb.en)[others] if tense == "present" else verb.en_past
    if clause.modal:
        forms = clause.modal[2:5] if order == "question" else clause.modal[:2]
        auxiliary, main = forms[others], _join(*forms[2:], verb.en)
    elif verb is SEIN:
        past = "was" if person in ("1s", "3s") else "were"
        auxiliary, main = past if tense == "past" else {"1s": "am", "3s": "is"}.get(person, "are"), ""
    elif tense in ("perfect", "future"):
        auxiliary, main = ("will", verb.en) if tense == "future" else (("has", "have")[others], verb.en_participle)
    elif order == "question" or clause.negative:
        auxiliary, main = "did" if tense == "past" else ("does", "do")[others], verb.en
    subject = "" if order == "rest" else clause.subject.en
    begin = (auxiliary, subject) if order == "question" else (subject, auxiliary)
    if clause.accusative and clause.accusative.en_object and main.endswith((" up", " away")):
        main, _, particle = main.rpartition(" ")  # picks him up
    objects = [part.en_object or part.en for part in (clause.dative, clause.accusative) if part]
    after = [part.en for part in (clause.predicate, clause.place, clause.time) if part]
    return _join(*begin, "not" if clause.negative else "", main, *objects, particle, *after)


def german(clause: Clause, order: str = "statement", front: str = "") -> str:
    """The clause in German. order: as in english() but rest with the verb last, or final (all, with the verb last).

    front: first constituent of a statement instead of the subject.
    """
    subject, verb, person = clause.subject.de["nom"], clause.verb, clause.subject.person
    objects = [(part, case) for part, case in ((clause.accusative, "acc"), (clause.dative, "dat")) if part]
    pronouns = [part.de[case] for part, case in objects if part.en_object]
    nouns = [part.de[case] for part, case in reversed(objects) if not part.en_object]
    after = [part.de for part in (clause.place, clause.predicate) if part]
    middle = [clause.time.de if clause.time else "", *nouns, "nicht" if clause.negative else "", *after]
    end, prefix = verb.prefix + verb.infinitive, ""
    if clause.tense in ("present", "past"):
        finite, end, prefix = verb.finite(clause.tense, person), "", verb.prefix
    elif clause.tense == "perfect":
        finite, end = (SEIN if verb.auxiliary == "sein" else HABEN).finite("present", person), verb.participle
    elif clause.tense == "future":
        finite = WERDEN.finite("present", person)
    else:
        finite = clause.modal[5:][PERSONS.index(person)]
    if order in ("final", "rest"):
        return _join(subject if order == "final" else "", *pronouns, *middle, end, prefix + finite)
    if order == "statement" and not front:
        return _join(subject, finite, *pronouns, *middle, end, prefix)
    first = [subject, *pronouns] if clause.subject.en_object else [*pronouns, subject]
    return _join(front, finite, *first, *middle, end, prefix)


def with_relative(clause: Clause) -> NounPhrase:
    """The clause as a relative clause of its subject: the man who sleeps, der Mann, der schläft."""
    head = clause.subject
    tail = f", {words.ending('d', head.gender, 'nom')} {german(clause, 'rest')} ,"
    cases = {case: f"{text} {tail}" for case, text in head.de.items()}
    return replace(head, en=f"{head.en} who {english(clause, 'rest')}", de=cases)


def finish(text: str, mark: str = ".") -> str:
    """Orthography: contractions, spaces around commas, capital letter, final punctuation mark."""
    sentence = words.contracted(text).replace(" ,", ",").rstrip(",")
    return sentence[0].upper() + sentence[1:] + mark


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


class Sentences:
    """A generator of sentence pairs; uses only random.random(), whose sequence is the same in all Python versions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> Phrase:
        """The next sentence in English and German."""
        kind = self.pick([self.statement] * 4 + [self.joined] * 2 + [self.relative, self.question, self.description])
        mark = "?" if kind == self.question else "."
        return Phrase(*(finish(text, mark) for text in kind()))

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def noun_phrase(self, kind: str, role: str = "object", noun: Noun | None = None) -> NounPhrase:
        """Determiner, perhaps an adjective, noun. role: a key of the grammar's determiners."""
        plural = noun is None and self.chance(0.25)
        noun = noun or self.pick(NOUNS[kind])
        suiting = words.ADJECTIVES.get(kind, words.ADJECTIVES["things"])
        adjectives = [self.pick(suiting)] if self.chance(0.4) else []
        if plural and role == "object" and self.chance(0.4):
            determiner = number(self.pick(range(2, 100)))
        else:
            table = GRAMMAR["determiners"][role]["plural" if plural else "singular"].split()
            determiner = Phrase(*self.pick(list(zip(table[::2], table[1::2]))))
        return assemble(determiner, adjectives, noun, plural)

    def person(self, role: str = "object", other_than: NounPhrase | None = None) -> NounPhrase:
        """A pronoun, a name or a noun phrase; pronouns never overlap with other_than ("we ask me")."""
        if self.chance(0.25):
            en, en_object, *cases, person = self.pick(words.rows(GRAMMAR["pronouns"]))
            if other_than is None or other_than.person[0] != person[0]:
                return NounPhrase(en, dict(zip(CASES, cases)), person, en_object=en_object)
        if self.chance(0.2):
            name = self.pick(GRAMMAR["names"].split())
            return NounPhrase(name, dict.fromkeys(CASES, name))
        return self.noun_phrase("persons", role)

    def time(self, tense: str) -> Phrase:
        """A time: on Monday, at half past seven, on March 12, or an adverb of the tense."""
        kind = tense if tense == "perfect" else self.pick(("weekday", "clock", "date", "any", tense))
        if kind == "date":
            (en, de), day = self.pick(PAIRS["months"]), self.pick(range(1, 29))
            return Phrase(f"on {en} {day}", f"am {day}. {de}")
        return Phrase(*self.pick(PAIRS[kind]))

    def place(self, going: bool = False) -> Phrase:
        """A place: in the kitchen, at the station, in Berlin; going: to the station (zu, dative)."""
        if not going and self.chance(0.15):
            return Phrase(*self.pick(PAIRS["cities"]))
        noun, en, de = self.pick(words.PLACES)
        phrase = self.noun_phrase("places", "definite", noun)
        return Phrase(f"{'to' if going else en} {phrase.en}", f"{'zu' if going else de} {phrase.de['dat']}")

    def action(self, subject: NounPhrase | None = None, tense: str = "", *, rich: bool = True) -> Clause:
        """A clause with a full verb; rich: with optional time, place and negation."""
        tense = tense or self.pick(("present", "present", "past", "past", "perfect", "future", "modal"))
        subject = subject or self.person("subject")
        negative = rich and tense != "modal" and self.chance(0.15)
        negative = negative and not subject.en.startswith(("no ", "every ", "all ", "many "))
        modal = self.pick(words.rows(GRAMMAR["modals"])) if tense == "modal" else ()
        role = "definite" if negative else "object"
        clause = Clause(subject, SEIN, tense, modal, negative)
        kind = self.pick(("transitive",) * 4 + ("dative", "ditransitive", "intransitive", "motion"))
        if kind == "transitive":
            verb, kinds = self.pick(words.TRANSITIVE)
            what = self.pick(kinds)
            accusative = self.person(role, subject) if what == "persons" else self.noun_phrase(what, role)
            clause = replace(clause, verb=verb, accusative=accusative)
        else:
            clause = replace(clause, verb=self.pick(VERBS[kind]))
        if kind in ("dative", "ditransitive"):
            clause = replace(clause, dative=self.person(role, subject))
        if kind == "ditransitive":
            clause = replace(clause, accusative=self.noun_phrase(self.pick(("things", "foods", "clothes")), role))
        if kind == "motion" or (rich and self.chance(0.3)):
            clause = replace(clause, place=self.place(going=kind == "motion"))
        return replace(clause, time=self.time(tense)) if rich and self.chance(0.3) else clause

    def statement(self) -> Phrase:
        """A main clause, possibly with a time in first position."""
        clause = self.action()
        if clause.time and self.chance(0.4):
            time, clause = clause.time, replace(clause, time=None)
            return Phrase(f"{time.en} {english(clause)}", german(clause, front=time.de))
        return Phrase(english(clause), german(clause))

    def joined(self) -> Phrase:
        """A main and a subordinate clause, in either order: because, although, while, says that."""
        tense = self.pick(("present", "past"))
        inner = self.action(tense=tense)
        if self.chance(0.3):
            main = Clause(self.person("subject"), self.pick(VERBS["reporting"]), tense)
            return Phrase(f"{english(main)} that {english(inner)}", f"{german(main)} , dass {german(inner, 'final')}")
        main, (en, de) = self.action(tense=tense, rich=False), self.pick(PAIRS["conjunctions"])
        en, de = f"{en} {english(inner)}", f"{de} {german(inner, 'final')}"
        if self.chance(0.3):
            return Phrase(f"{en} , {english(main)}", german(main, front=f"{de} ,"))
        return Phrase(f"{english(main)} {en}", f"{german(main)} , {de}")

    def relative(self) -> Phrase:
        """A sentence with a relative clause: the man who sleeps buys the book."""
        tense = self.pick(("present", "past"))
        described = with_relative(self.action(self.noun_phrase("persons", "definite"), tense, rich=False))
        clause = self.action(described, tense, rich=False)
        return Phrase(english(clause), german(clause))

    def question(self) -> Phrase:
        clause = self.action(self.person("definite"))
        return Phrase(english(clause, "question"), german(clause, "question"))

    def description(self) -> Phrase:
        """A sentence with a predicative adjective: the table was not new."""
        kind, tense = self.pick(("persons", "things", "animals")), self.pick(("present", "past"))
        subject = self.noun_phrase(kind, "definite")
        adjective = self.pick([each for each in words.ADJECTIVES[kind] if each[0] not in subject.en.split()])
        predicate = Phrase(*adjective[:2])
        clause = Clause(subject, SEIN, tense, negative=self.chance(0.2), predicate=predicate)
        return Phrase(english(clause), german(clause))
