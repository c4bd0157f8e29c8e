"""German inflection for the demo corpus: articles, adjective endings, noun cases, contractions, verb forms."""

from __future__ import annotations

from collections.abc import Sequence

from fasttfm.data.demo.lexicon import Adjective, Noun
from fasttfm.data.demo.verbs import Verb

CASES = ("nom", "acc", "dat", "gen")
PERSONS = ("1s", "2s", "3s", "1p", "3p")

# Endings by gender (p: plural), in the order of CASES; "-" is no ending.
_DEFINITE = {
    "m": "der den dem des",
    "f": "die die der der",
    "n": "das das dem des",
    "p": "die die den der",
}
_LIKE_DER = {"m": "er en em es", "f": "e e er er", "n": "es es em es", "p": "e e en er"}
_LIKE_EIN = {"m": "- en em es", "f": "e e er er", "n": "- - em es", "p": "e e en er"}
_WEAK = {"m": "e en en en", "f": "e e en en", "n": "e e en en", "p": "en en en en"}
_MIXED = {"m": "er en en en", "f": "e e en en", "n": "es es en en", "p": "en en en en"}
_STRONG_PLURAL = {"p": "e e en er"}

_DER_WORDS = {"dies", "jed", "all", "viel"}
_CONTRACTIONS = {
    "in dem": "im",
    "an dem": "am",
    "bei dem": "beim",
    "von dem": "vom",
    "zu dem": "zum",
    "zu der": "zur",
    "in das": "ins",
    "an das": "ans",
}

HABEN = Verb("", "", "", "", "haben", "", "habe", "hast", "hat", "hatte", "gehabt", "haben")
SEIN = Verb("be", "is", "was", "been", "sein", "", "bin", "bist", "ist", "war", "gewesen", "sein")
WERDEN = Verb("", "", "", "", "werden", "", "werde", "wirst", "wird", "wurde", "geworden", "sein")


def _ending(table: dict[str, str], gender: str, case: str) -> str:
    ending = table[gender].split()[CASES.index(case)]
    return "" if ending == "-" else ending


def noun_phrase(determiner: str, adjectives: Sequence[Adjective], noun: Noun, case: str, plural: bool) -> str:
    """A declined phrase. determiner: "d" for der/die/das, a stem (dies, ein, kein, mein …), or a numeral."""
    gender = "p" if plural else noun.gender
    if determiner == "d":
        words, adjective_endings = [_ending(_DEFINITE, gender, case)], _WEAK
    elif determiner in _DER_WORDS:
        words = [determiner + _ending(_LIKE_DER, gender, case)]
        adjective_endings = _STRONG_PLURAL if determiner == "viel" else _WEAK
    elif determiner in _EIN_WORDS:
        words, adjective_endings = [determiner + _ending(_LIKE_EIN, gender, case)], _MIXED
    else:
        words, adjective_endings = [determiner], _STRONG_PLURAL
    words += [adjective.stem + _ending(adjective_endings, gender, case) for adjective in adjectives]
    return " ".join([*words, noun_form(noun, case, plural)])


_EIN_WORDS = {"ein", "kein", "mein", "dein", "sein", "ihr", "unser"}


def noun_form(noun: Noun, case: str, plural: bool) -> str:
    """The noun in its case."""
    if plural:
        return noun.plural + ("n" if case == "dat" and not noun.plural.endswith(("n", "s")) else "")
    return {"nom": noun.de, "gen": noun.genitive}.get(case, noun.oblique)


def relative_pronoun(gender: str, case: str) -> str:
    """der, die, das … that starts a relative clause; nominative or accusative."""
    return _ending(_DEFINITE, gender, case)


def with_preposition(preposition: str, phrase: str) -> str:
    """Preposition and an already declined phrase, contracted where German does: in dem -> im."""
    first, _, rest = phrase.partition(" ")
    contracted = _CONTRACTIONS.get(f"{preposition} {first}")
    return f"{contracted} {rest}" if contracted else f"{preposition} {phrase}"


def present(verb: Verb, person: str) -> str:
    """The finite present, without the separable prefix."""
    if verb is SEIN and person in ("1p", "3p"):
        return "sind"
    forms = (verb.first, verb.second, verb.third, verb.infinitive, verb.infinitive)
    return forms[PERSONS.index(person)]


def preterite(verb: Verb, person: str) -> str:
    """The finite preterite, without the separable prefix."""
    if person in ("1s", "3s"):
        return verb.past
    if person == "2s":
        return verb.past + ("est" if verb.past.endswith(("t", "d", "s", "ß")) else "st")
    return verb.past + ("n" if verb.past.endswith("e") else "en")


def infinitive(verb: Verb) -> str:
    """With the separable prefix."""
    return verb.prefix + verb.infinitive


def infinitive_with_zu(verb: Verb) -> str:
    """zu kaufen, aufzumachen."""
    return f"{verb.prefix}zu{verb.infinitive}" if verb.prefix else f"zu {verb.infinitive}"


def verb_parts(verb: Verb, tense: str, person: str, modal: tuple[str, ...] | None = None) -> tuple[str, str, str]:
    """(finite, end, prefix): the finite verb, what stands at the end of the clause, and a prefix torn off in front.

    In a main clause the finite verb comes second and end + prefix last; in a subordinate one the order is end,
    prefix + finite. modal: the forms of a modal verb for all persons, with tense "modal".
    """
    if tense == "present":
        return present(verb, person), "", verb.prefix
    if tense == "past":
        return preterite(verb, person), "", verb.prefix
    if tense == "perfect":
        auxiliary = SEIN if verb.auxiliary == "sein" else HABEN
        return present(auxiliary, person), verb.participle, ""
    if tense == "future":
        return present(WERDEN, person), infinitive(verb), ""
    if tense == "modal" and modal is not None:
        return modal[PERSONS.index(person)], infinitive(verb), ""
    raise ValueError(f"tense {tense!r}")
