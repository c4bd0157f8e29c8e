"""The demo corpus: reproducible, disjoint splits, one German sentence per English sentence."""

import hashlib
import itertools

import pytest

from fasttfm.cli.main import main
from fasttfm.data.demo import SPLITS, demo_corpus, demo_pairs, write_demo_corpus
from fasttfm.data.demo.sentences import Sentences
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError


def test_other_files_are_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setitem(SPLITS, "train", 1_000)
    (tmp_path / "train.de").write_text("years of work\n")
    with pytest.raises(UserError, match=r"contains other files \(train\.de\), which are not replaced"):
        write_demo_corpus(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.de"]
    (tmp_path / "train.de").unlink()
    files = {path: path.read_bytes() for path in write_demo_corpus(tmp_path)}
    (tmp_path / "test.en").unlink()
    write_demo_corpus(tmp_path)
    assert {path: path.read_bytes() for path in files} == files
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in files} == {".lock", "sha256sums"}


def test_the_corpus_is_a_dataset_of_prepare(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SPLITS, "train", 1_000)
    words = ["--dataset", "demo", "--data-dir", str(tmp_path), "--vocab-size", "400", "--threads", "1"]
    assert main(["prepare", *words, "--out", str(tmp_path / "data")]) == 0
    assert f"test set demo: {tmp_path / 'demo' / 'test.en'} and" in capsys.readouterr().out
    assert len(PreparedData.open(tmp_path / "data").valid) == SPLITS["valid"]
    assert len((tmp_path / "demo" / "test.de").read_text().splitlines()) == SPLITS["test"]


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[tuple[str, str]]]:
    return demo_corpus()


def test_no_sentence_occurs_twice_on_either_side_of_any_split(corpus):
    assert {split: len(pairs) for split, pairs in corpus.items()} == SPLITS
    for side in (0, 1):
        sentences = [pair[side] for pairs in corpus.values() for pair in pairs]
        assert len(set(sentences)) == len(sentences)


def test_the_corpus_is_the_same_on_every_machine(corpus):
    text = "\n".join("\t".join(pair) for pairs in corpus.values() for pair in pairs)
    digest = "d5d3292548d0a9c0d600e0d6ba1c44ec66e0d4842f9f47785bab1e3f1add2686"
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert list(itertools.islice(demo_pairs(1), 5)) != list(itertools.islice(demo_pairs(2), 5))


def test_one_english_sentence_has_one_german_sentence():
    sentences, meanings = Sentences(5), {}
    for _ in range(6_000):
        en, de = sentences.next()
        assert meanings.setdefault(en, de) == de
