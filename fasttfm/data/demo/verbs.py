"""The verbs of the demo corpus, English beside German, with every form that is not regular."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """A verb with its principal parts."""

    en: str
    en_third: str
    en_past: str
    en_participle: str
    infinitive: str
    """Without the separable prefix."""
    prefix: str
    """Separable prefix, or empty."""
    first: str
    """ich …, present."""
    second: str
    """du …, present."""
    third: str
    """er …, present."""
    past: str
    """ich … and er …, preterite."""
    participle: str
    """With the prefix."""
    auxiliary: str
    """haben or sein."""


def _verbs(table: str) -> list[Verb]:
    """Lines "english forms: german forms", English words joined by _.

    English is "base third past [participle]". German is "infinitive" for a regular verb, or all of "infinitive first
    second third past participle"; a prefix stands before "|", and "s" at the end says that the auxiliary is sein.
    """
    verbs = []
    for line in table.strip().splitlines():
        english, german = (part.split() for part in line.split(":"))
        base, third, past, *participle = (word.replace("_", " ") for word in english)
        auxiliary = "haben"
        if german[-1] == "s":
            auxiliary, german = "sein", german[:-1]
        prefix, _, infinitive = german[0].rpartition("|")
        forms = [*(german[1:] or _regular(infinitive, prefix)), auxiliary]
        english_perfect = participle[0] if participle else past
        verbs.append(Verb(base, third, past, english_perfect, infinitive, prefix, *forms))
    return verbs


_INSEPARABLE = ("be", "ver", "er", "emp", "ent", "zer")


def _regular(infinitive: str, prefix: str) -> list[str]:
    """first, second, third, past and participle of a weak verb."""
    stem = infinitive.removesuffix("n") if infinitive.endswith(("ern", "eln")) else infinitive.removesuffix("en")
    link = "e" if stem.endswith(("t", "d", "chn", "ffn")) else ""
    second = f"{stem}t" if stem.endswith(("s", "ß", "z")) else f"{stem}{link}st"
    no_ge = infinitive.startswith(_INSEPARABLE) or infinitive.endswith("ieren")
    participle = f"{prefix}{'' if no_ge else 'ge'}{stem}{link}t"
    return [f"{stem}e", second, f"{stem}{link}t", f"{stem}{link}te", participle]


TRANSITIVE = [
    (verb, classes.split())
    for classes, table in {
        "things clothes foods animals": """
buy buys bought: kaufen
sell sells sold: verkaufen
need needs needed: brauchen
look_for looks_for looked_for: suchen
find finds found: finden finde findest findet fand gefunden
carry carries carried: tragen trage trägst trägt trug getragen
""",
        "things clothes": """
repair repairs repaired: reparieren
lose loses lost: verlieren verliere verlierst verliert verlor verloren
hide hides hid hidden: verstecken
forget forgets forgot forgotten: vergessen vergesse vergisst vergisst vergaß vergessen
pack packs packed: ein|packen
throw_away throws_away threw_away thrown_away: weg|werfen werfe wirfst wirft warf weggeworfen
clean cleans cleaned: putzen
""",
        "persons animals": """
see sees saw seen: sehen sehe siehst sieht sah gesehen
hear hears heard: hören
love loves loved: lieben
wake_up wakes_up woke_up woken_up: auf|wecken
""",
        "persons": """
visit visits visited: besuchen
call calls called: an|rufen rufe rufst ruft rief angerufen
invite invites invited: ein|laden lade lädst lädt lud eingeladen
pick_up picks_up picked_up: ab|holen
understand understands understood: verstehen verstehe verstehst versteht verstand verstanden
ask asks asked: fragen
""",
        "animals": """
feed feeds fed: füttern
""",
        "foods": """
eat eats ate eaten: essen esse isst isst aß gegessen
cook cooks cooked: kochen
""",
        "openings": """
open opens opened: öffnen
close closes closed: zu|machen
paint paints painted: streichen streiche streichst streicht strich gestrichen
""",
        "places": """
admire admires admired: bewundern
leave leaves left: verlassen verlasse verlässt verlässt verließ verlassen
""",
    }.items()
    for verb in _verbs(table)
]
"""(verb, classes of nouns that can be its accusative object)."""

DATIVE = _verbs("""
help helps helped: helfen helfe hilfst hilft half geholfen
thank thanks thanked: danken
follow follows followed: folgen s
trust trusts trusted: vertrauen
answer answers answered: antworten
""")

DITRANSITIVE = _verbs("""
give gives gave given: geben gebe gibst gibt gab gegeben
show shows showed shown: zeigen
send sends sent: schicken
bring brings brought: bringen bringe bringst bringt brachte gebracht
promise promises promised: versprechen verspreche versprichst verspricht versprach versprochen
""")

INTRANSITIVE = _verbs("""
sleep sleeps slept: schlafen schlafe schläfst schläft schlief geschlafen
work works worked: arbeiten
laugh laughs laughed: lachen
sing sings sang sung: singen singe singst singt sang gesungen
dance dances danced: tanzen
wait waits waited: warten
cry cries cried: weinen
play plays played: spielen
sit sits sat: sitzen sitze sitzt sitzt saß gesessen
stay stays stayed: bleiben bleibe bleibst bleibt blieb geblieben s
get_up gets_up got_up: auf|stehen stehe stehst steht stand aufgestanden s
fall_asleep falls_asleep fell_asleep fallen_asleep: ein|schlafen schlafe schläfst schläft schlief eingeschlafen s
arrive arrives arrived: an|kommen komme kommst kommt kam angekommen s
""")

MOTION = _verbs("""
go goes went gone: gehen gehe gehst geht ging gegangen s
drive drives drove driven: fahren fahre fährst fährt fuhr gefahren s
walk walks walked: laufen laufe läufst läuft lief gelaufen s
""")

JOURNEY = _verbs("""
fly flies flew flown: fliegen fliege fliegst fliegt flog geflogen s
travel travels travelled: reisen s
""")

REPORTING = _verbs("""
say says said: sagen
believe believes believed: glauben
think thinks thought: denken denke denkst denkt dachte gedacht
hope hopes hoped: hoffen
write writes wrote written: schreiben schreibe schreibst schreibt schrieb geschrieben
""")

WITH_INFINITIVE = _verbs("""
try tries tried: versuchen
hope hopes hoped: hoffen
forget forgets forgot forgotten: vergessen vergesse vergisst vergisst vergaß vergessen
promise promises promised: versprechen verspreche versprichst verspricht versprach versprochen
""")

# English statement (third person, others) and question (third person, others, what follows the subject);
# German for ich, du, er, wir, sie.
MODALS = (
    (("can", "can"), ("can", "can", ""), ("kann", "kannst", "kann", "können", "können")),
    (("must", "must"), ("must", "must", ""), ("muss", "musst", "muss", "müssen", "müssen")),
    (("may", "may"), ("may", "may", ""), ("darf", "darfst", "darf", "dürfen", "dürfen")),
    (("wants to", "want to"), ("does", "do", "want to"), ("will", "willst", "will", "wollen", "wollen")),
    (
        ("would like to", "would like to"),
        ("would", "would", "like to"),
        ("möchte", "möchtest", "möchte", "möchten", "möchten"),
    ),
    (("should", "should"), ("should", "should", ""), ("sollte", "solltest", "sollte", "sollten", "sollten")),
    (("had to", "had to"), ("did", "did", "have to"), ("musste", "musstest", "musste", "mussten", "mussten")),
)
