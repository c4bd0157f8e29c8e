"""The words of the demo corpus, English beside German, as tables that a reader can check line by line.

An English form has one German meaning wherever a sentence of the corpus can use it: no "sie" for "you", no verb whose
past looks like its present (read, put), no noun that is also a verb form (cooks). Every feminine or masculine person is
fixed by its English noun, so a translation never has to guess.
"""

from __future__ import annotations

from typing import NamedTuple


class Noun(NamedTuple):
    """A noun with all the German forms that are not regular."""

    en: str
    en_plural: str
    gender: str
    """m, f or n."""
    de: str
    """Nominative singular."""
    genitive: str
    plural: str
    """Nominative plural; the dative adds n where German does."""
    oblique: str
    """Accusative and dative singular, different from the nominative only for weak masculines."""


class Adjective(NamedTuple):
    """An adjective; stem is what attributive endings are added to."""

    en: str
    de: str
    stem: str
    en_comparative: str
    de_comparative: str
    """Empty where a comparison makes no sense."""


class Place(NamedTuple):
    """A place, and how one is there: the preposition in each language (German with the dative)."""

    noun: Noun
    en_at: str
    de_at: str


def _nouns(table: str) -> list[Noun]:
    """Lines "en en_plural gender de genitive plural [oblique]"."""
    rows = [line.split() for line in table.strip().splitlines()]
    return [
        Noun(en, en_plural, gender, de, genitive, plural, oblique[0] if oblique else de)
        for en, en_plural, gender, de, genitive, plural, *oblique in rows
    ]


def _pairs(text: str) -> list[tuple[str, str]]:
    """English and German words in turn."""
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))


def _adjectives(table: str) -> list[Adjective]:
    """Lines "en de [en_comparative de_comparative [stem]]", words of one form joined by _."""
    adjectives = []
    for line in table.strip().splitlines():
        words = [word.replace("_", " ") for word in line.split()]
        en, de, en_comparative, de_comparative, stem = [*words, "", "", ""][:5]
        adjectives.append(Adjective(en, de, stem or de, en_comparative, de_comparative))
    return adjectives


PLACES = [
    Place(noun, at, de)
    for (at, de), table in {
        ("in", "in"): """
kitchen kitchens f Küche Küche Küchen
garden gardens m Garten Gartens Gärten
house houses n Haus Hauses Häuser
school schools f Schule Schule Schulen
city cities f Stadt Stadt Städte
village villages n Dorf Dorfes Dörfer
forest forests m Wald Waldes Wälder
park parks m Park Parks Parks
hotel hotels n Hotel Hotels Hotels
museum museums n Museum Museums Museen
church churches f Kirche Kirche Kirchen
hospital hospitals n Krankenhaus Krankenhauses Krankenhäuser
shop shops m Laden Ladens Läden
room rooms n Zimmer Zimmers Zimmer
""",
        ("at", "an"): """
station stations m Bahnhof Bahnhofs Bahnhöfe
airport airports m Flughafen Flughafens Flughäfen
lake lakes m See Sees Seen
river rivers m Fluss Flusses Flüsse
""",
        ("at", "auf"): """
market markets m Markt Marktes Märkte
""",
        ("on", "auf"): """
bridge bridges f Brücke Brücke Brücken
mountain mountains m Berg Berges Berge
street streets f Straße Straße Straßen
""",
    }.items()
    for noun in _nouns(table)
]

NOUNS = {
    "persons": _nouns("""
man men m Mann Mannes Männer
woman women f Frau Frau Frauen
child children n Kind Kindes Kinder
boy boys m Junge Jungen Jungen Jungen
girl girls n Mädchen Mädchens Mädchen
teacher teachers m Lehrer Lehrers Lehrer
doctor doctors f Ärztin Ärztin Ärztinnen
farmer farmers m Bauer Bauern Bauern Bauern
neighbour neighbours m Nachbar Nachbarn Nachbarn Nachbarn
student students m Student Studenten Studenten Studenten
brother brothers m Bruder Bruders Brüder
sister sisters f Schwester Schwester Schwestern
mother mothers f Mutter Mutter Mütter
father fathers m Vater Vaters Väter
aunt aunts f Tante Tante Tanten
uncle uncles m Onkel Onkels Onkel
grandmother grandmothers f Großmutter Großmutter Großmütter
grandfather grandfathers m Großvater Großvaters Großväter
daughter daughters f Tochter Tochter Töchter
son sons m Sohn Sohnes Söhne
baker bakers m Bäcker Bäckers Bäcker
singer singers f Sängerin Sängerin Sängerinnen
painter painters f Malerin Malerin Malerinnen
friend friends m Freund Freundes Freunde
king kings m König Königs Könige
queen queens f Königin Königin Königinnen
"""),
    "animals": _nouns("""
dog dogs m Hund Hundes Hunde
cat cats f Katze Katze Katzen
horse horses n Pferd Pferdes Pferde
bird birds m Vogel Vogels Vögel
cow cows f Kuh Kuh Kühe
mouse mice f Maus Maus Mäuse
lion lions m Löwe Löwen Löwen Löwen
bear bears m Bär Bären Bären Bären
"""),
    "foods": _nouns("""
bread breads n Brot Brotes Brote
apple apples m Apfel Apfels Äpfel
cake cakes m Kuchen Kuchens Kuchen
egg eggs n Ei Eies Eier
banana bananas f Banane Banane Bananen
potato potatoes f Kartoffel Kartoffel Kartoffeln
onion onions f Zwiebel Zwiebel Zwiebeln
sausage sausages f Wurst Wurst Würste
"""),
    "things": _nouns("""
book books n Buch Buches Bücher
letter letters m Brief Briefes Briefe
newspaper newspapers f Zeitung Zeitung Zeitungen
picture pictures n Bild Bildes Bilder
ball balls m Ball Balls Bälle
lamp lamps f Lampe Lampe Lampen
chair chairs m Stuhl Stuhls Stühle
table tables m Tisch Tisches Tische
clock clocks f Uhr Uhr Uhren
key keys m Schlüssel Schlüssels Schlüssel
bag bags f Tasche Tasche Taschen
suitcase suitcases m Koffer Koffers Koffer
box boxes f Kiste Kiste Kisten
bottle bottles f Flasche Flasche Flaschen
cup cups f Tasse Tasse Tassen
knife knives n Messer Messers Messer
spoon spoons m Löffel Löffels Löffel
glass glasses n Glas Glases Gläser
ring rings m Ring Rings Ringe
guitar guitars f Gitarre Gitarre Gitarren
computer computers m Computer Computers Computer
bicycle bicycles n Fahrrad Fahrrads Fahrräder
car cars n Auto Autos Autos
boat boats n Boot Bootes Boote
bed beds n Bett Bettes Betten
umbrella umbrellas m Regenschirm Regenschirms Regenschirme
"""),
    "clothes": _nouns("""
coat coats m Mantel Mantels Mäntel
shirt shirts n Hemd Hemdes Hemden
dress dresses n Kleid Kleides Kleider
hat hats m Hut Hutes Hüte
shoe shoes m Schuh Schuhs Schuhe
jacket jackets f Jacke Jacke Jacken
"""),
    "openings": _nouns("""
door doors f Tür Tür Türen
window windows n Fenster Fensters Fenster
gate gates n Tor Tores Tore
"""),
    "places": [place.noun for place in PLACES],
}
"""Kind -> its nouns."""

COMPOUNDS = {
    ("kitchen", "Küchen"): "table chair lamp clock knife door window",
    ("garden", "Garten"): "table chair door gate house",
    ("school", "Schul"): "bag book door garden",
    ("winter", "Winter"): "coat shoe hat jacket garden",
    ("summer", "Sommer"): "dress shoe hat jacket house",
    ("travel", "Reise"): "bag",
    ("children's", "Kinder"): "book chair coat shoe bed room",
    ("wooden", "Holz"): "table chair door box spoon house bed bridge",
    ("leather", "Leder"): "bag coat shoe jacket suitcase",
    ("silver", "Silber"): "ring knife spoon",
    ("bread", "Brot"): "knife",
    ("city", "Stadt"): "park museum",
    ("fishing", "Fischer"): "boat village",
}
"""(English modifier, German first part) -> heads: "kitchen table" is one German word, Küchentisch."""

_ADJECTIVES = {
    adjective.en: adjective
    for adjective in _adjectives("""
old alt older älter
young jung younger jünger
friendly freundlich friendlier freundlicher
clever klug cleverer klüger
tired müde more_tired müder müd
happy glücklich happier glücklicher
rich reich richer reicher
poor arm poorer ärmer
strong stark stronger stärker
tall groß taller größer
new neu newer neuer
big groß bigger größer
small klein smaller kleiner
heavy schwer heavier schwerer
expensive teuer more_expensive teurer teur
cheap billig cheaper billiger
beautiful schön more_beautiful schöner
red rot
blue blau
green grün
white weiß
black schwarz
quiet ruhig quieter ruhiger
dark dunkel darker dunkler dunkl
clean sauber cleaner sauberer
fresh frisch fresher frischer
warm warm warmer wärmer
cold kalt colder kälter
hungry hungrig hungrier hungriger
""")
}
ADJECTIVES = {
    kind: [_ADJECTIVES[word] for word in words.split()]
    for kind, words in {
        "persons": "old young friendly clever tired happy rich poor strong tall",
        "things": "old new big small heavy expensive cheap beautiful red blue green white black",
        "places": "old new big small beautiful quiet dark clean",
        "foods": "fresh warm cold big small cheap",
        "animals": "old young big small black white strong hungry",
    }.items()
}
"""Kind of noun -> the adjectives that suit it; of kinds that are not here, those of things."""

# English subject, object and possessive; German nominative, accusative, dative and possessive stem; person.
PRONOUNS = (
    ("I", "me", "my", "ich", "mich", "mir", "mein", "1s"),
    ("you", "you", "your", "du", "dich", "dir", "dein", "2s"),
    ("he", "him", "his", "er", "ihn", "ihm", "sein", "3s"),
    ("she", "her", "her", "sie", "sie", "ihr", "ihr", "3s"),
    ("we", "us", "our", "wir", "uns", "uns", "unser", "1p"),
    ("they", "them", "their", "sie", "sie", "ihnen", "ihr", "3p"),
)

NAMES = ["Anna", "Peter", "Maria", "Paul", "Julia", "Martin", "Lena", "Emma", "Robert", "Laura"]
SURNAMES = ["Schneider", "Fischer", "Weber", "Wagner"]
CITIES = _pairs("Berlin Berlin Hamburg Hamburg Munich München Cologne Köln Vienna Wien Paris Paris")
MONTHS = _pairs(
    "January Januar February Februar March März April April May Mai June Juni July Juli August August "
    "September September October Oktober November November December Dezember"
)
WEEKDAYS = _pairs(
    "Monday Montag Tuesday Dienstag Wednesday Mittwoch Thursday Donnerstag Friday Freitag Saturday Samstag "
    "Sunday Sonntag"
)
FREQUENCY = _pairs("often oft always immer sometimes manchmal rarely selten never nie usually meistens")
MANNER = _pairs("quickly schnell slowly langsam quietly leise carefully vorsichtig together zusammen alone allein")

UNITS = _pairs(
    "zero null one ein two zwei three drei four vier five fünf six sechs seven sieben eight acht nine neun ten zehn "
    "eleven elf twelve zwölf thirteen dreizehn fourteen vierzehn fifteen fünfzehn sixteen sechzehn "
    "seventeen siebzehn eighteen achtzehn nineteen neunzehn"
)
"""0 to 19."""
TENS = _pairs(
    "- - - - twenty zwanzig thirty dreißig forty vierzig fifty fünfzig sixty sechzig seventy siebzig eighty achtzig "
    "ninety neunzig"
)
"""20 to 90, at their tens."""
