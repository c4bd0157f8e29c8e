"""Phrases and clauses of the demo corpus: one structure, said in English and in German.

German order follows from the structure alone: the finite verb second in a main clause, first in a question, last in a
subordinate clause; before the end of the clause stand, in this order, pronouns and names, time, dative, accusative,
"nicht", manner, place and complement. Where the subject follows the verb and is no pronoun, object pronouns go first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fasttfm.data.demo import german
from fasttfm.data.demo.verbs import Verb

_PARTICLES = {"up", "along", "away"}  # English adverbs that a pronoun stands before: picks him up

Modal = tuple[tuple[str, str], tuple[str, str, str], tuple[str, ...]]
"""A row of verbs.MODALS."""


@dataclass(frozen=True)
class Phrase:
    """The same words in both languages, not inflected further."""

    en: str
    de: str


@dataclass(frozen=True)
class NounPhrase:
    """A noun phrase in both languages, in all cases that it may be needed in."""

    en: str
    de: dict[str, str]
    """Case -> the declined phrase."""
    person: str = "3s"
    """1s, 2s, 3s, 1p or 3p."""
    gender: str = "m"
    """m, f, n, or p for every plural: what a relative pronoun agrees with."""
    en_object: str = ""
    """The English object form where it differs."""
    pronoun: bool = False
    early: bool = False
    """German puts it before the time: pronouns and names."""

    @property
    def en_as_object(self) -> str:
        return self.en_object or self.en


@dataclass(frozen=True)
class Clause:
    """Who does what to whom, when, how and where."""

    subject: NounPhrase
    verb: Verb
    tense: str = "present"
    """present, past, perfect, future or modal."""
    modal: Modal | None = None
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


def statement(clause: Clause) -> tuple[str, str]:
    """The clause in English and in German."""
    return english(clause), german_main(clause)


def english(clause: Clause) -> str:
    """The statement: The man does not buy the book."""
    return _words(clause.subject.en, english_rest(clause))


def english_question(clause: Clause) -> str:
    """Does the man buy the book"""
    auxiliary, main = _english_verb(clause, is_question=True)
    return _words(auxiliary, clause.subject.en, *_english_adverbs(clause), *_english_objects(main, clause))


def english_infinitive(clause: Clause) -> str:
    """to buy the book"""
    return _words("to", *_english_objects(clause.verb.en, clause))


def english_rest(clause: Clause) -> str:
    """The statement without its subject: does not buy the book."""
    auxiliary, main = _english_verb(clause)
    return _words(auxiliary, *_english_adverbs(clause), *_english_objects(main, clause))


def german_main(clause: Clause, front: str = "") -> str:
    """The statement, with `front` (time, or a whole subordinate clause) or else the subject before the verb."""
    if front:
        return _words(front, german_question(clause))
    return _words(clause.subject.de["nom"], german_rest(clause))


def german_rest(clause: Clause) -> str:
    """The statement without its subject, verb first: as question and after "und"."""
    finite, end, prefix = _german_verb(clause)
    return _words(finite, *_german_middle(clause), end, prefix)


def german_question(clause: Clause) -> str:
    """Verb first, then the subject: questions, and main clauses with something else in front."""
    finite, end, prefix = _german_verb(clause)
    subject, middle = clause.subject.de["nom"], _german_middle(clause)
    pronouns = sum(1 for part in (clause.accusative, clause.dative) if part and part.pronoun)
    before = 0 if clause.subject.pronoun else pronouns
    return _words(finite, *middle[:before], subject, *middle[before:], end, prefix)


def german_final(clause: Clause, with_subject: bool = True) -> str:
    """The subordinate order, verb last."""
    finite, end, prefix = _german_verb(clause)
    subject = clause.subject.de["nom"] if with_subject else ""
    return _words(subject, *_german_middle(clause), end, prefix + finite)


def german_infinitive(clause: Clause) -> str:
    """das Buch zu kaufen"""
    return _words(*_german_middle(clause), german.infinitive_with_zu(clause.verb))


def with_relative(phrase: NounPhrase, clause: Clause, role: str) -> NounPhrase:
    """The phrase with a relative clause in which it is the subject ("nom") or the accusative object ("acc").

    In `clause` its own place is filled by anything (subject) or None (object).
    """
    pronoun = german.relative_pronoun(phrase.gender, role)
    if role == "nom":
        inner = replace(clause, subject=replace(phrase, pronoun=False))
        en = _words(phrase.en, "who", english_rest(inner))
        tail = german_final(inner, with_subject=False)
    else:
        en = _words(phrase.en, "which", english(clause))
        tail = german_final(clause)
    cases = {case: f"{text} , {pronoun} {tail} ," for case, text in phrase.de.items()}
    return replace(phrase, en=en, de=cases)


def both(left: NounPhrase, right: NounPhrase) -> NounPhrase:
    """left and right, a plural."""
    cases = {case: f"{left.de[case]} und {right.de[case]}" for case in left.de if case in right.de}
    return NounPhrase(f"{left.en} and {right.en}", cases, person="3p", gender="p")


def of(head: NounPhrase, owner: NounPhrase) -> NounPhrase:
    """The door of the house: die Tür des Hauses."""
    cases = {case: f"{text} {owner.de['gen']}" for case, text in head.de.items()}
    return replace(head, en=f"{head.en} of {owner.en}", de=cases)


def finish(text: str, mark: str = ".") -> str:
    """One written sentence: commas closed up, first letter large, the mark at its end."""
    words: list[str] = []
    for word in text.split():
        if word == ",":
            if words and not words[-1].endswith(","):
                words[-1] += ","
        else:
            words.append(word)
    sentence = " ".join(words).rstrip(",")
    return sentence[0].upper() + sentence[1:] + mark


def _words(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _third(clause: Clause, third: str, others: str) -> str:
    return third if clause.subject.person == "3s" else others


def _english_be(clause: Clause) -> str:
    if clause.tense == "past":
        return "was" if clause.subject.person in ("1s", "3s") else "were"
    return {"1s": "am", "3s": "is"}.get(clause.subject.person, "are")


def _english_verb(clause: Clause, is_question: bool = False) -> tuple[str, str]:
    """The auxiliary, and what stands after it; empty is the one without an auxiliary, or the other after "be"."""
    verb, tense = clause.verb, clause.tense
    if clause.modal:
        third, others, *rest = clause.modal[int(is_question)]
        return _third(clause, third, others), _words(*rest, verb.en)
    if verb is german.SEIN and tense in ("present", "past"):
        return _english_be(clause), ""
    if tense == "perfect":
        return _third(clause, "has", "have"), verb.en_participle
    if tense == "future":
        return "will", verb.en
    if is_question or clause.negative:
        return "did" if tense == "past" else _third(clause, "does", "do"), verb.en
    return "", verb.en_past if tense == "past" else _third(clause, verb.en_third, verb.en)


def _english_adverbs(clause: Clause) -> list[str]:
    return ["not" if clause.negative else "", clause.frequency.en if clause.frequency else ""]


def _english_objects(verb: str, clause: Clause) -> list[str]:
    """The verb and all that follows it."""
    after = [part.en for part in (clause.complement, clause.manner, clause.place, clause.time) if part]
    direct = clause.accusative.en_as_object if clause.accusative else ""
    indirect = clause.dative.en_as_object if clause.dative else ""
    first, _, particle = verb.rpartition(" ")
    if particle in _PARTICLES and clause.accusative and clause.accusative.pronoun:
        return [first, direct, particle, *after]
    if clause.dative_with_to and clause.dative:
        return [verb, direct, "to", indirect, *after]
    return [verb, indirect, direct, *after]


def _german_verb(clause: Clause) -> tuple[str, str, str]:
    modal = clause.modal[2] if clause.modal else None
    return german.verb_parts(clause.verb, clause.tense, clause.subject.person, modal)


def _german_middle(clause: Clause) -> list[str]:
    objects = [(clause.accusative, "acc"), (clause.dative, "dat")]
    early = [phrase.de[case] for phrase, case in objects if phrase and phrase.early]
    late = [phrase.de[case] for phrase, case in reversed(objects) if phrase and not phrase.early]
    no = ["nicht"] if clause.negative else []
    before = [part.de for part in (clause.time, clause.frequency) if part]
    after = [part.de for part in (clause.manner, clause.place, clause.complement) if part]
    return [*early, *before, *late, *no, *after]
