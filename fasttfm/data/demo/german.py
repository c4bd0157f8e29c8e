"""German inflection for the demo corpus: articles, adjective endings, noun cases, contractions, verb forms."""

from __future__ import annotations

from collections.abc import Sequence

from fasttfm.data.demo.words import GRAMMAR, VERBS, Adjective, Noun, Verb

CASES = ("nom", "acc", "dat", "gen")
PERSONS = ("1s", "2s", "3s", "1p", "3p")
SEIN, HABEN, WERDEN = VERBS["auxiliary"]


def _ending(table: str, gender: str, case: str) -> str:
    return GRAMMAR["endings"][table][gender].split()[CASES.index(case)].removeprefix("-")


def noun_phrase(determiner: str, adjectives: Sequence[Adjective], noun: Noun, case: str, plural: bool) -> str:
    """A declined phrase. determiner: "d" for der/die/das, a stem (dies, ein, kein, mein …), or a numeral."""
    gender = "p" if plural else noun.gender
    endings = "weak"
    if determiner == "d":
        determiner = _ending("d", gender, case)
    elif determiner in GRAMMAR["declined_like_der"].split():
        endings = "strong" if determiner == "viel" else "weak"
        determiner += _ending("like_der", gender, case)
    elif determiner in GRAMMAR["declined_like_ein"].split():
        endings = "mixed"
        determiner += _ending("like_ein", gender, case)
    else:
        endings = "strong"
    described = [adjective.stem + _ending(endings, gender, case) for adjective in adjectives]
    return " ".join([determiner, *described, noun_form(noun, case, plural)])


def noun_form(noun: Noun, case: str, plural: bool) -> str:
    """The noun in its case."""
    if plural:
        return noun.plural + ("n" if case == "dat" and not noun.plural.endswith(("n", "s")) else "")
    return {"nom": noun.de, "gen": noun.genitive}.get(case, noun.oblique)


def relative_pronoun(gender: str, case: str) -> str:
    """der, die, das … that starts a relative clause; nominative or accusative."""
    return _ending("d", gender, case)


def with_preposition(preposition: str, phrase: str) -> str:
    """Preposition and an already declined phrase, contracted where German does: in dem -> im."""
    first, _, rest = phrase.partition(" ")
    contracted = GRAMMAR["contractions"].get(f"{preposition} {first}")
    return f"{contracted} {rest}" if contracted else f"{preposition} {phrase}"


def present(verb: Verb, person: str) -> str:
    """The finite present, without the separable prefix."""
    if verb is SEIN and person in ("1p", "3p"):
        return "sind"
    return {"1s": verb.first, "2s": verb.second, "3s": verb.third}.get(person, verb.infinitive)


def preterite(verb: Verb, person: str) -> str:
    """The finite preterite, without the separable prefix."""
    if person in ("1s", "3s"):
        return verb.past
    if person == "2s":
        return verb.past + ("est" if verb.past.endswith(("t", "d", "s", "ß")) else "st")
    return verb.past + ("n" if verb.past.endswith("e") else "en")


def verb_parts(verb: Verb, tense: str, person: str, modal: Sequence[str]) -> tuple[str, str, str]:
    """(finite, end, prefix): the finite verb, what stands at the end of the clause, and a prefix torn off in front.

    In a main clause the finite verb comes second and end + prefix last; in a subordinate one the order is end,
    prefix + finite. modal: the forms of a modal verb for all persons, with tense "modal".
    """
    infinitive = verb.prefix + verb.infinitive
    if tense == "present":
        return present(verb, person), "", verb.prefix
    if tense == "past":
        return preterite(verb, person), "", verb.prefix
    if tense == "perfect":
        return present(SEIN if verb.auxiliary == "sein" else HABEN, person), verb.participle, ""
    return present(WERDEN, person) if tense == "future" else modal[PERSONS.index(person)], infinitive, ""
