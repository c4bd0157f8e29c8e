"""fairseq models with fastBPE or subword-nmt codes: import, translation, fine-tuning and export."""

import itertools
from typing import NamedTuple

import pytest
import torch
from fairseq_models import EOS, UNK, write
from plain_bpe import apply, fastbpe_file, learn, subword_nmt_file

from fasttfm.cli.main import main
from fasttfm.convert.exchange import load
from fasttfm.data.demo import demo_pairs
from fasttfm.translate import Translator

sacremoses = pytest.importorskip("sacremoses")
LANGUAGES = ("en", "de")


class Corpus(NamedTuple):
    pairs: list[tuple[str, str]]
    codes: list[tuple[str, str]]
    pieces: list[str]

    def cut(self, line: str, language: str) -> list[str]:
        words = sacremoses.MosesTokenizer(language).tokenize(line)
        return [piece for word in words for piece in apply(self.codes, word)]


@pytest.fixture(scope="module")
def corpus():
    pairs = list(itertools.islice(demo_pairs(), 60))
    tokens = [
        " ".join(sacremoses.MosesTokenizer(language).tokenize(line))
        for pair in pairs
        for language, line in zip(LANGUAGES, pair, strict=True)
    ]
    codes = learn(tokens, 150)
    pieces = sorted({piece for line in tokens for word in line.split() for piece in apply(codes, word)})
    return Corpus(pairs, codes, pieces)


def words(folder, *more):
    command = ["import", str(folder / "checkpoint.pt"), "--format", "fairseq", "--dict", str(folder / "dict.src.txt")]
    return [*command, *map(str, more)]


def with_codes(folder, *more):
    return words(folder, "--codes", folder / "codes", "--out", folder / "MODEL", *more)


@pytest.fixture(scope="module")
def model(tmp_path_factory, corpus):
    """A directory with MODEL, its reference implementation, and the pieces of its dictionary."""
    folder = tmp_path_factory.mktemp("fairseq")
    reference, sides = write(folder, pieces=corpus.pieces, source_lang="en", target_lang="de")
    (folder / "codes").write_text(fastbpe_file(corpus.codes), encoding="utf-8")
    assert main(with_codes(folder)) == 0
    return folder, reference, sides[0]


def test_translations_equal_those_of_a_reimplementation(model, corpus):
    folder, reference, pieces = model
    lines = [english for english, _ in corpus.pairs[:5]]
    with Translator.from_directory(folder / "MODEL", beam=1, max_len_a=0.0, max_len_b=20, workers=1) as translator:
        translations = translator.translate(lines)
    numbers = {piece: number for number, piece in enumerate(pieces)}
    detokenize = sacremoses.MosesDetokenizer("de").detokenize
    for line, translation in zip(lines, translations, strict=True):
        source = [numbers.get(piece, UNK) for piece in corpus.cut(line, "en")]
        written = [pieces[number] for number in reference.greedy(torch.tensor([*source, EOS]), 20)]
        words = (" ".join(written) + " ").replace("@@ ", "").split()
        assert translation == detokenize([word for word in words if word != "<unk>"])
    assert len(set(translations)) > 1


def test_an_export_to_ctranslate2_comes_back(model, tmp_path, capsys):
    pytest.importorskip("ctranslate2")
    folder = model[0] / "MODEL"
    assert main(["export", str(folder), "--format", "ctranslate2", "--out", str(tmp_path / "CT2")]) == 0
    assert "source text is tokenized by sacremoses and source.codes: Moses tokens (en)" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "CT2"), "--format", "ctranslate2", "--out", str(tmp_path / "BACK")]) == 0
    before, after = load(folder).source_tokenizer, load(tmp_path / "BACK").source_tokenizer
    assert after.encode("the dog runs .") == before.encode("the dog runs .")
    assert str(after.vocabulary) == str(before.vocabulary)


def test_codes_of_another_corpus_or_tokenizer_are_refused(model, tmp_path, refusal_of, corpus):
    (tmp_path / "other").write_text(fastbpe_file(learn(["zyx zyx zyx wvu wvu"], 9)), encoding="utf-8")
    (tmp_path / "codes").write_text(fastbpe_file(corpus.codes), encoding="utf-8")
    write(tmp_path, source_lang="en", target_lang="de")  # its dictionary is of SentencePiece
    other = tmp_path / "without languages"
    other.mkdir()
    write(other, pieces=corpus.pieces)
    (other / "codes").write_text(subword_nmt_file(corpus.codes), encoding="utf-8")
    spm = tmp_path / "spm.model"
    single = sum(len(piece.removesuffix("@@")) == 1 for piece in corpus.pieces) / len(corpus.pieces)
    for folder, given, message in (
        (model[0], ("--codes", tmp_path / "other"), f"has the pieces of {single:.1%} of the tokens in"),
        (model[0], ("--spm", spm), "give their --codes instead of --spm"),
        (model[0], ("--codes", tmp_path / "none"), "no such file of codes"),
        (other, ("--codes", other / "codes"), "--source-language: Moses' rules need it"),
        (tmp_path, ("--codes", tmp_path / "codes"), "0% of its tokens end in @@"),
        (tmp_path, ("--codes", tmp_path / "codes", "--spm", spm), "either --spm or --codes"),
    ):
        assert message in refusal_of(words(folder, *given, "--out", tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()
