"""The demo corpus: the same everywhere, learnable, correct German, nothing tested that was trained on."""

import hashlib
import itertools

import pytest

from fasttfm.cli.main import main
from fasttfm.data.demo import SPLITS, demo_corpus, demo_pairs, write_demo_corpus
from fasttfm.data.demo import sentences as say
from fasttfm.data.demo.sentences import Clause, NounPhrase, Phrase, Sentences, assemble, number
from fasttfm.data.demo.words import ADJECTIVES, GRAMMAR, NOUNS, PAIRS, PERSONS, TRANSITIVE, VERBS, contracted, rows
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError


def test_files_of_somebody_else_are_not_overwritten(tmp_path):
    (tmp_path / "train.de").write_text("years of work\n")
    with pytest.raises(UserError, match=r"holds other files \(train\.de\), which are not replaced"):
        write_demo_corpus(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.de"]
    (tmp_path / "train.de").unlink()
    files = {path: path.read_bytes() for path in write_demo_corpus(tmp_path)}
    (tmp_path / "test.en").unlink()
    write_demo_corpus(tmp_path)
    assert {path: path.read_bytes() for path in files} == files
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in files} == {".lock", "sha256sums"}


def test_prepare_takes_the_corpus_as_a_dataset(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SPLITS, "train", 1_000)
    words = ["--dataset", "demo", "--data-dir", str(tmp_path), "--vocab-size", "400", "--threads", "1"]
    assert main(["prepare", *words, "--out", str(tmp_path / "data")]) == 0
    assert f"test set demo: {tmp_path / 'demo' / 'test.en'} and" in capsys.readouterr().out
    assert len(PreparedData.open(tmp_path / "data").valid) == SPLITS["valid"]
    assert len((tmp_path / "demo" / "test.de").read_text().splitlines()) == SPLITS["test"]


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[tuple[str, str]]]:
    return demo_corpus()


def noun(en: str):
    return next(noun for noun in (*NOUNS["persons"], *NOUNS["things"]) if noun.en == en)


def adjective(en: str):
    return next(adjective for adjective in (*ADJECTIVES["persons"], *ADJECTIVES["things"]) if adjective[0] == en)


def verb(en: str):
    verbs = (*(entry[0] for entry in TRANSITIVE), *VERBS["dative"], *VERBS["intransitive"])
    return next(verb for verb in verbs if verb.en == en)


def phrase(en: str, de: str, noun_en: str, plural: bool = False, *adjectives: str) -> NounPhrase:
    described = [adjective(a) for a in adjectives]
    return assemble(Phrase(en, de), described, noun(noun_en), plural)


def test_no_sentence_occurs_twice_on_either_side_of_any_split(corpus):
    assert {split: len(pairs) for split, pairs in corpus.items()} == SPLITS
    for side in (0, 1):
        sentences = [pair[side] for pairs in corpus.values() for pair in pairs]
        assert len(set(sentences)) == len(sentences)


def test_the_corpus_is_the_same_on_every_machine(corpus):
    text = "\n".join("\t".join(pair) for pairs in corpus.values() for pair in pairs)
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "d5d3292548d0a9c0d600e0d6ba1c44ec66e0d4842f9f47785bab1e3f1add2686"
    )
    assert list(itertools.islice(demo_pairs(1), 5)) != list(itertools.islice(demo_pairs(2), 5))


def test_one_english_sentence_has_one_german_sentence():
    sentences, meanings = Sentences(5), {}
    for _ in range(20_000):
        en, de = sentences.next()
        assert meanings.setdefault(en, de) == de


def test_sentences_are_4_to_18_words_of_some_hundreds_of_lexemes(corpus):
    train = [en for en, _ in corpus["train"]]
    assert {len(en.split()) for en in train} == set(range(4, 19))
    known = {word for en in train for word in en.strip(".?").replace(",", "").lower().split() if word.isalpha()}
    assert 400 < len(known) < 1000
    for split in ("valid", "test"):
        unknown = [w for en, _ in corpus[split] for w in en.strip(".?").replace(",", "").lower().split()]
        assert all(word in known for word in unknown if word.isalpha())


@pytest.mark.parametrize(
    ("determiner", "name", "plural", "declined"),
    [
        ("d", "man", False, "der alte Mann, den alten Mann, dem alten Mann, des alten Mannes"),
        ("ein", "woman", False, "eine alte Frau, eine alte Frau, einer alten Frau, einer alten Frau"),
        ("ein", "book", False, "ein altes Buch, ein altes Buch, einem alten Buch, eines alten Buches"),
        ("kein", "boy", False, "kein alter Junge, keinen alten Jungen, keinem alten Jungen, keines alten Jungen"),
        ("jed", "girl", False, "jedes alte Mädchen, jedes alte Mädchen, jedem alten Mädchen, jedes alten Mädchens"),
        (
            "unser",
            "chair",
            True,
            "unsere alten Stühle, unsere alten Stühle, unseren alten Stühlen, unserer alten Stühle",
        ),
        ("zwei", "car", True, "zwei alte Autos, zwei alte Autos, zwei alten Autos, zwei alter Autos"),
        ("viel", "book", True, "viele alte Bücher, viele alte Bücher, vielen alten Büchern, vieler alter Bücher"),
        ("all", "friend", True, "alle alten Freunde, alle alten Freunde, allen alten Freunden, aller alten Freunde"),
    ],
)
def test_adjectives_agree_in_gender_case_and_number(determiner: str, name: str, plural: bool, declined: str):
    assert ", ".join(phrase("-", determiner, name, plural, "old").de.values()) == declined


def test_some_adjectives_change_their_stem_and_an_article_its_form():
    assert phrase("a", "ein", "car", False, "expensive").de["nom"] == "ein teures Auto"
    assert phrase("the", "d", "boy", False, "tired").de["dat"] == "dem müden Jungen"
    assert phrase("a", "ein", "car", False, "old").en == "an old car"


def test_prepositions_contract_as_german_does():
    assert contracted("zu der alten Frau") == "zur alten Frau"
    assert contracted("in das Haus") == "ins Haus"
    assert contracted("an dem See") == "am See"
    assert contracted("in diesem Haus") == "in diesem Haus"
    assert contracted("mit dem Hund") == "mit dem Hund"


def test_the_verb_stands_where_the_clause_wants_it():
    man, boy = phrase("the", "d", "man"), phrase("the", "d", "boy")
    calls = Clause(man, verb("call"), accusative=boy, time=Phrase("today", "heute"))
    assert say.english(calls) == "the man calls the boy today"
    assert say.german(calls) == "der Mann ruft heute den Jungen an"
    assert say.german(calls, "final") == "der Mann heute den Jungen anruft"
    assert say.german(calls, "question") == "ruft der Mann heute den Jungen an"
    assert say.english(calls, "question") == "does the man call the boy today"
    perfect = Clause(man, verb("call"), "perfect", accusative=boy, negative=True)
    assert say.german(perfect) == "der Mann hat den Jungen nicht angerufen"
    assert say.german(perfect, "final") == "der Mann den Jungen nicht angerufen hat"
    assert say.english(perfect) == "the man has not called the boy"


def test_pronouns_go_before_a_noun_subject_that_follows_the_verb():
    him = NounPhrase("he", {"nom": "er", "acc": "ihn", "dat": "ihm"}, en_object="him")
    we = NounPhrase("we", {"nom": "wir", "acc": "uns", "dat": "uns"}, person="1p", en_object="us")
    man = phrase("the", "d", "man")
    assert say.german(Clause(man, verb("help"), dative=him), front="heute") == "heute hilft ihm der Mann"
    assert say.german(Clause(we, verb("help"), dative=him), front="heute") == "heute helfen wir ihm"
    assert say.english(Clause(man, verb("pick up"), accusative=him)) == "the man picks him up"


def test_relative_pronouns_agree_with_their_noun():
    children = say.with_relative(Clause(phrase("the", "d", "child", True), verb("sing"), "past"))
    assert children.en == "the children who sang"
    assert say.finish(children.de["dat"]) == "Den Kindern, die sangen."
    buying = Clause(phrase("the", "d", "woman"), verb("buy"), "perfect", accusative=phrase("a", "ein", "table"))
    woman = say.with_relative(buying)
    assert woman.en == "the woman who has bought a table"
    assert say.finish(f"{woman.de['nom']} lacht") == "Die Frau, die einen Tisch gekauft hat, lacht."


def test_numbers_and_times_are_said_as_each_language_does():
    assert (number(21).en, number(21).de) == ("twenty-one", "einundzwanzig")
    assert (number(16).de, number(30).de, number(77).de) == ("sechzehn", "dreißig", "siebenundsiebzig")
    times = dict(PAIRS["clock"])
    assert times["at half past eleven"] == "um halb zwölf"
    assert times["at half past seven"] == "um halb acht"
    assert times["at three o'clock"] == "um drei Uhr"


@pytest.mark.parametrize(
    ("en", "present", "past", "participle"),
    [
        ("open", "öffne öffnest öffnet öffnen", "öffnete öffnetest öffnete öffneten", "geöffnet"),
        ("feed", "füttere fütterst füttert füttern", "fütterte füttertest fütterte fütterten", "gefüttert"),
        ("invite", "lade lädst lädt laden", "lud ludest lud luden", "eingeladen"),
        ("clean", "putze putzt putzt putzen", "putzte putztest putzte putzten", "geputzt"),
        ("sell", "verkaufe verkaufst verkauft verkaufen", "verkaufte verkauftest verkaufte verkauften", "verkauft"),
        (
            "admire",
            "bewundere bewunderst bewundert bewundern",
            "bewunderte bewundertest bewunderte bewunderten",
            "bewundert",
        ),
        ("visit", "besuche besuchst besucht besuchen", "besuchte besuchtest besuchte besuchten", "besucht"),
        ("eat", "esse isst isst essen", "aß aßest aß aßen", "gegessen"),
    ],
)
def test_verbs_are_conjugated(en: str, present: str, past: str, participle: str):
    assert [verb(en).finite("present", person) for person in PERSONS[:4]] == present.split()
    assert [verb(en).finite("past", person) for person in PERSONS[:4]] == past.split()
    assert verb(en).finite("present", "3p") == verb(en).finite("present", "1p")
    assert verb(en).participle == participle


def test_modals_ask_as_english_does():
    modals = {row[0]: row for row in rows(GRAMMAR["modals"])}
    asked = {
        name: say.english(Clause(phrase("the", "d", "man"), verb("sleep"), "modal", modal=modals[name]), "question")
        for name in ("can", "wants to", "would like to", "had to")
    }
    assert asked == {
        "can": "can the man sleep",
        "wants to": "does the man want to sleep",
        "would like to": "would the man like to sleep",
        "had to": "did the man have to sleep",
    }
