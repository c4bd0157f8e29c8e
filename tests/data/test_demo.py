"""The demo corpus: the same on every machine, in a folder that it does not share."""

import hashlib
import itertools

import pytest

from fasttfm.data.demo import SPLITS, demo_corpus, demo_pairs, write_demo_corpus
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


def test_the_corpus_is_the_same_on_every_machine():
    corpus = demo_corpus()
    text = "\n".join("\t".join(pair) for pairs in corpus.values() for pair in pairs)
    digest = "d5d3292548d0a9c0d600e0d6ba1c44ec66e0d4842f9f47785bab1e3f1add2686"
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert list(itertools.islice(demo_pairs(1), 5)) != list(itertools.islice(demo_pairs(2), 5))
