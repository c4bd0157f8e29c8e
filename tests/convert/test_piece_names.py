"""Formats that identify pieces by name: a piece keeps its name or is refused, and never becomes a special token."""

import io

import pytest
import sentencepiece
from model_dirs import TEXT, tokenizer, write_model_dir

from fasttfm.cli.main import main
from fasttfm.convert import ctranslate2_read, m2m100
from fasttfm.convert.exchange import load, store
from fasttfm.data.tokenizer import PAD

from .their_folders import write_m2m

pytest.importorskip("ctranslate2")
transformers = pytest.importorskip("transformers")
OTHER_NAMES = {"pad_piece": "[PAD]", "unk_piece": "[UNK]", "bos_piece": "[BOS]", "eos_piece": "[EOS]"}


def write_with_piece(folder, *pieces: str):
    """Write a model directory with these user-defined pieces and renamed special tokens."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=len(tokenizer()), model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", user_defined_symbols=list(pieces), pad_id=0, unk_id=1,
        bos_id=2, eos_id=3, minloglevel=2, **OTHER_NAMES,
    )  # fmt: skip
    write_model_dir(folder, trained=False)
    (folder / "spm.model").write_bytes(model.getvalue())
    return folder


@pytest.mark.parametrize(
    ("form", "piece", "special"),
    [("ctranslate2", "<blank>", 0), ("ctranslate2", "<s>", 2), ("marian-hf", "<pad>", 0), ("marian-hf", "</s>", 3)],
)
def test_a_piece_with_a_special_tokens_name_is_refused(form, piece, special, tmp_path, refusal_of):
    model_dir = write_with_piece(tmp_path / "model", piece)
    told = refusal_of(["export", model_dir, "--format", form, "--out", tmp_path / "out"])
    assert f"piece 4 of the vocabulary is {piece!r}, and so is piece {special} in this format" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("form", "piece"), [("ctranslate2", "<pad>"), ("marian-hf", "<blank>")])
def test_other_names_survive_export_and_import(form, piece, tmp_path, capsys):
    """Both directions are compared with the other tool."""
    model_dir, there, back = write_with_piece(tmp_path / "model", piece), tmp_path / "there", tmp_path / "back"
    assert main(["export", str(model_dir), "--format", form, "--out", str(there)]) == 0
    assert main(["import", str(there), "--format", form, "--out", str(back)]) == 0
    assert capsys.readouterr().out.count("3 texts are translated as") == 2
    ours, theirs = (load(each).source_tokenizer for each in (model_dir, back))
    for text in (f"a {piece} dog", f"{piece}", "<s> a </s> [PAD] [UNK] dog"):
        assert theirs.encode(text) == ours.encode(text)
        assert PAD not in theirs.encode(text)


def test_two_tokens_of_an_imported_vocabulary_have_two_names(tmp_path, capsys):
    """M2M-100 starts with </s> and has an unused <s>."""
    (tmp_path / "m2m").mkdir()
    write_m2m(tmp_path / "m2m")
    store(m2m100.read(tmp_path / "m2m", "en", "de"), tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--format", "ctranslate2", "--out", str(tmp_path / "out")]) == 0
    assert "3 texts are translated as" in capsys.readouterr().out
    names = ctranslate2_read.vocabulary(tmp_path / "out", "target")
    assert names.count("<s>") == 1
    assert any(name.startswith("<s>#") for name in names)
