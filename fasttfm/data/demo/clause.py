"""Phrases and clauses of the demo corpus: one structure, said in English and in German.

German order follows from the structure alone: the finite verb second in a main clause, first in a question, last in a
subordinate clause; before the end of the clause stand, in this order, pronouns and names, time, dative, accusative,
"nicht", manner, place and complement. Where the subject follows the verb and is not a pronoun, object pronouns go
first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fasttfm.data.demo.words import CASES, LISTS, SEIN, Adjective, Noun, Verb, contracted, declined, ending


class Phrase(NamedTuple):
    """The same words in both languages, not inflected further."""

    en: str
    de: str


@dataclass(frozen=True)
class NounPhrase:
    """A noun phrase in both languages, in all cases that it may be needed in (case -> the declined phrase)."""

    en: str
    de: dict[str, str]
    person: str = "3s"
    """1s, 2s, 3s, 1p or 3p."""
    gender: str = "m"
    """m, f, n, or p for every plural: what a relative pronoun agrees with."""
    en_object: str = ""
    """The English object form where it differs."""
    pronoun: bool = False
    early: bool = False
    """German puts it before the time: pronouns and names."""


@dataclass(frozen=True)
class Clause:
    """Subject, verb, object, time, manner and place of a clause."""

    subject: NounPhrase
    verb: Verb
    tense: str = "present"
    """present, past, perfect, future or modal."""
    modal: Sequence[str] = ()
    """A row of MODALS."""
    accusative: NounPhrase | None = None
    dative: NounPhrase | None = None
    dative_with_to: bool = False
    """English: gives the book to the woman; German is the same either way."""
    negative: bool = False
    time: Phrase | None = None
    frequency: Phrase | None = None
    manner: Phrase | None = None
    place: Phrase | None = None
    complement: Phrase | None = None
    """A predicate of "be"."""


def assemble(determiner: str, adjectives: Sequence[Adjective], noun: Noun, plural: bool) -> NounPhrase:
    """determiner: English and German, "the d" or "twenty-one einundzwanzig"."""
    en, de = determiner.split()
    words = [*(adjective.en for adjective in adjectives), noun.en_plural if plural else noun.en]
    return NounPhrase(
        en=" ".join(["an" if en == "a" and words[0][0] in "aeiou" else en, *words]),
        de={case: declined(de, adjectives, noun, case, plural) for case in CASES},
        person="3p" if plural else "3s",
        gender="p" if plural else noun.gender,
    )


def with_relative(phrase: NounPhrase, clause: Clause, role: str) -> NounPhrase:
    """The phrase with a relative clause in which it is the subject ("nom") or the accusative object ("acc").

    In `clause` its own place is filled by anything (subject) or None (object).
    """
    if role == "nom":
        inner = replace(clause, subject=replace(phrase, pronoun=False))
        en, tail = f"{phrase.en} who {english(inner, 'rest')}", german(inner, "final rest")
    else:
        en, tail = f"{phrase.en} which {english(clause)}", german(clause, "final")
    pronoun = ending("d", phrase.gender, role)
    return replace(phrase, en=en, de={case: f"{text} , {pronoun} {tail} ," for case, text in phrase.de.items()})


def both(left: NounPhrase, right: NounPhrase) -> NounPhrase:
    """left and right, a plural."""
    cases = {case: f"{left.de[case]} und {right.de[case]}" for case in left.de if case in right.de}
    return NounPhrase(f"{left.en} and {right.en}", cases, person="3p", gender="p")


def of(head: NounPhrase, owner: NounPhrase) -> NounPhrase:
    """The door of the house: die Tür des Hauses."""
    cases = {case: f"{text} {owner.de['gen']}" for case, text in head.de.items()}
    return replace(head, en=f"{head.en} of {owner.en}", de=cases)


def finish(text: str, mark: str = ".") -> str:
    """One written sentence: commas closed up, German's contractions, first letter large, the mark at its end."""
    sentence = contracted(" ".join(text.split())).replace(" ,", ",").replace(",,", ",").rstrip(",")
    return sentence[0].upper() + sentence[1:] + mark


def statement(clause: Clause) -> Phrase:
    """The clause in English and in German."""
    return Phrase(english(clause), german(clause))


def english(clause: Clause, order: str = "statement") -> str:
    """statement: the man does not buy the book; rest: the same without its subject; question; infinitive: to buy …"""
    if order == "infinitive":
        return _join("to", *_english_objects(clause.verb.en, clause))
    auxiliary, main = _english_verb(clause, is_question=order == "question")
    subject = clause.subject.en
    begin = {"statement": (subject, auxiliary), "rest": (auxiliary,), "question": (auxiliary, subject)}[order]
    adverbs = "not" if clause.negative else "", clause.frequency.en if clause.frequency else ""
    return _join(*begin, *adverbs, *_english_objects(main, clause))


def german(clause: Clause, order: str = "statement", front: str = "") -> str:
    """The clause in German, as english() gives it in English. final: the subordinate order, verb last; final rest:
    without its subject.

    front: what stands before the verb of a statement (time, or a whole subordinate clause) in place of the subject.
    """
    subject, middle, verb = clause.subject.de["nom"], _german_middle(clause), clause.verb
    if order == "infinitive":
        return _join(*middle, f"{verb.prefix}zu{'' if verb.prefix else ' '}{verb.infinitive}")
    finite, end, prefix = verb.parts(clause.tense, clause.subject.person, clause.modal[5:])
    if order in ("final", "final rest"):
        return _join(subject if order == "final" else "", *middle, end, prefix + finite)
    if order == "rest" or (order == "statement" and not front):
        return _join(subject if order == "statement" else "", finite, *middle, end, prefix)
    pronouns = sum(1 for part in (clause.accusative, clause.dative) if part and part.pronoun)
    before = 0 if clause.subject.pronoun else pronouns
    return _join(front, finite, *middle[:before], subject, *middle[before:], end, prefix)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _english_verb(clause: Clause, is_question: bool = False) -> tuple[str, str]:
    """The auxiliary, and what stands after it; empty is the one without an auxiliary, or the other after "be"."""
    verb, tense, person = clause.verb, clause.tense, clause.subject.person

    def third(form: str, others: str) -> str:
        return form if person == "3s" else others

    if clause.modal:
        forms = clause.modal[2:5] if is_question else clause.modal[:2]
        return third(*forms[:2]), _join(*forms[2:], verb.en)
    if verb is SEIN and tense in ("present", "past"):
        if tense == "past":
            return "was" if person in ("1s", "3s") else "were", ""
        return {"1s": "am", "3s": "is"}.get(person, "are"), ""
    if tense in ("perfect", "future"):
        return ("will", verb.en) if tense == "future" else (third("has", "have"), verb.en_participle)
    if is_question or clause.negative:
        return "did" if tense == "past" else third("does", "do"), verb.en
    return "", verb.en_past if tense == "past" else third(verb.en_third, verb.en)


def _english_objects(verb: str, clause: Clause) -> list[str]:
    """The verb and all that follows it."""
    after = [part.en for part in (clause.complement, clause.manner, clause.place, clause.time) if part]
    direct, indirect = (part.en_object or part.en if part else "" for part in (clause.accusative, clause.dative))
    first, _, particle = verb.rpartition(" ")
    if particle in LISTS["particles"] and clause.accusative and clause.accusative.pronoun:
        return [first, direct, particle, *after]
    if clause.dative_with_to:
        return [verb, direct, "to", indirect, *after]
    return [verb, indirect, direct, *after]


def _german_middle(clause: Clause) -> list[str]:
    objects = [(clause.accusative, "acc"), (clause.dative, "dat")]
    early = [phrase.de[case] for phrase, case in objects if phrase and phrase.early]
    late = [phrase.de[case] for phrase, case in reversed(objects) if phrase and not phrase.early]
    before = [part.de for part in (clause.time, clause.frequency) if part]
    after = [part.de for part in (clause.manner, clause.place, clause.complement) if part]
    return [*early, *before, *late, *(["nicht"] if clause.negative else []), *after]
