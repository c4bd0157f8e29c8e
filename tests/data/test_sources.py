"""prepare with several files: weights, language tags, existing models; and the tokenize command."""

import io
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from fasttfm.cli.main import main
from fasttfm.data.prepare import PrepareOptions, prepare
from fasttfm.data.prepared import PreparedData
from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.data.tokenizer_files import save_tokenizers
from fasttfm.errors import UserError

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture
def files(tmp_path):
    """Training files with 12 and 8 pairs, and two validation files with 2 pairs each."""
    for name, lines in (("a", 12), ("b", 8), ("valid-a", 2), ("valid-b", 2)):
        for side in ("src", "tgt"):
            text = "".join(f"{name} {WORDS[i % 10]} {WORDS[i // 10]}\n" for i in range(lines))
            (tmp_path / f"{name}.{side}").write_text(text)
    return tmp_path


def run(folder, out="DATA", models=(), said=None, **options):
    sides = [
        [folder / f"{prefix}{name}.{side}" for name in "ab"] for prefix in ("", "valid-") for side in ("src", "tgt")
    ]
    options = PrepareOptions(**{"vocab_size": 60, "byte_fallback": False, **options})
    prepare(*sides, folder / out, options, models=models, say=(lambda line: None) if said is None else said.append)
    return PreparedData.open(folder / out)


def lines_of(data, pairs):
    return [data.source_tokenizer.decode(pairs.source(i)) for i in range(len(pairs))]


@pytest.mark.parametrize(("weights", "a", "b"), [((1, 3), 1, 3), ((0.5, 1.5), 0.5, 1.5), ((1, 0.25), 1, 0.25)])
def test_weights_set_the_copies_of_each_files_pairs(files, weights, a, b):
    data = run(files, weights=weights)
    results = Counter(line.split()[0] for line in lines_of(data, data.train))
    assert results == {"a": 12 * a, "b": 8 * b}
    assert data.description["train"]["pairs"] == 12 * a + 8 * b
    each = Counter(line for line in lines_of(data, data.train) if line.startswith("b"))
    assert max(each.values()) - min(each.values()) <= 1  # evenly over the file
    assert len(data.valid) == 4


def test_a_tag_precedes_every_source_line_as_one_piece(files):
    data = run(files, source_tags=("<2de>", "<2fr>"), valid_source_tags=("<2de>", "<2fr>"))
    for pairs, total in ((data.train, 12), (data.valid, 2)):
        lines = lines_of(data, pairs)
        assert [line.split()[0] for line in lines[:total]] == ["<2de>"] * total
        assert {line.split()[0] for line in lines[total:]} == {"<2fr>"}
    pieces = data.source_tokenizer.pieces(data.train.source(0))
    assert pieces[0] == "\u2581<2de>"
    assert pieces[1].startswith("\u2581")
    assert data.source_tokenizer.decode(data.source_tokenizer.encode("<2de> one two ten")) == "<2de> one two ten"
    assert not any("<2" in data.target_tokenizer.decode(data.train.target(i)) for i in range(20))


def test_an_existing_model_is_used(files):
    first = run(files)
    model = files / "DATA" / "spm.model"
    said = []
    repeated = run(files, "AGAIN", [model], said, vocab_size=50)
    assert (files / "AGAIN" / "spm.model").read_bytes() == model.read_bytes()
    assert [list(repeated.train.source(i)) for i in range(20)] == [list(first.train.source(i)) for i in range(20)]
    assert any("existing pieces" in line for line in said)
    two = run(files, "TWO", [model, model])
    assert not two.joint
    for folder, joint in ((files / "DATA", True), (files / "TWO", False)):
        of_folder = run(files, f"OF {folder.name}", [folder], vocab_size=50)
        assert of_folder.joint == joint
        assert list(of_folder.train.source(0)) == list(first.train.source(0))


def test_every_line_begins_with_the_language_code_of_an_imported_model(files):
    plain = run(files).source_tokenizer
    codes = ["__en__", "__de__"]
    pieces = [*plain.pieces(range(len(plain))), *codes]
    sides = [Tokenizer(plain.model, Vocabulary(pieces=pieces, prefix=[code], silent=codes)) for code in codes]
    (files / "MODEL").mkdir()
    save_tokenizers(files / "MODEL", *sides)
    data = run(files, "CODED", [files / "MODEL"])
    for pairs, line in ((data.train, "a one one"), (data.valid, "valid-a one one")):
        for ids, side in ((pairs.source(0), sides[0]), (pairs.target(0), sides[1])):
            assert ids.tolist() == [*side.prefix, *side.encode(line)]


def test_options_that_do_not_match_the_files_are_refused(files):
    for options, words in (
        ({"weights": (1,)}, "--weight: 1 given for 2 source files"),
        ({"source_tags": ("<a>",)}, "--source-tag: 1 given"),
        ({"source_tags": ("<a>", "<b>")}, "needs --valid-source-tag"),
        ({"weights": (1, 0)}, "above 0"),
        ({"source_script": "klingon"}, "--src-script klingon: must be one of latin"),
        ({"source_tags": ("a b", "c")}, "give one word"),
        ({"models": [files / "none"]}, "no such SentencePiece model"),
        ({"models": [files] * 3}, "give one model for both sides"),
    ):
        with pytest.raises(UserError, match=words):
            run(files, **options)


@pytest.mark.parametrize("more", [[], ["--ids"]])
def test_the_tokenize_command_encodes_and_decodes(files, monkeypatch, capsys, more):
    run(files)
    tokenizer = Tokenizer.load(files / "DATA" / "spm.model")

    def tokenize(text, *words):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        assert main(["tokenize", *map(str, words)]) == 0
        return capsys.readouterr().out

    text, ids = "one two ten\n\nseven a\n", tokenizer.encode("one two ten")
    for model in (files / "DATA", files / "DATA" / "spm.model"):
        encoded = tokenize(text, model, *more)
        assert encoded.splitlines()[0] == " ".join(map(str, ids) if more else tokenizer.pieces(ids))
        assert tokenize(encoded, "--decode", model, *more) == text
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"nonsense\n")))
    assert main(["tokenize", "--decode", str(files / "DATA"), *more]) == 2
    assert "nonsense is not a subword" in capsys.readouterr().err
