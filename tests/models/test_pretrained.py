"""save_pretrained() and from_pretrained(): a lossless round trip, and one-line errors for damaged files."""

import json

import pytest
import torch
from model_dirs import LINES, write_model_dir

import fasttfm
from fasttfm.errors import UserError
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.translate import Translator


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = write_model_dir(tmp_path_factory.mktemp("trained") / "model")
    record = {"kind": "valid", "step": 1, "loss": 2.0, "nll": 1.0, "bleu": 31.25}
    (path / "train.log.jsonl").write_text(json.dumps(record) + "\n{cut")
    return path


@pytest.fixture(scope="module")
def pretrained(model_dir):
    path = model_dir.parent / "pretrained"
    Transformer.from_pretrained(model_dir).save_pretrained(path, model_dir)
    return path


def test_it_translates_as_the_model_directory_does_and_by_its_settings(model_dir, pretrained):
    ours, theirs = (Translator.from_directory(path) for path in (model_dir, pretrained))
    assert theirs.config == ours.config
    assert theirs.model.config == ours.model.config
    torch.testing.assert_close(theirs.model.state_dict(), ours.model.state_dict(), rtol=0, atol=0)
    assert theirs.translate(LINES) == ours.translate(LINES)
    assert len(set(ours.translate(LINES))) > 2
    assert Translator.from_directory(pretrained, beam=2).config.beam == 2
    assert "| 1 | 2.00 | 2.72 | 31.25 |" in (pretrained / "README.md").read_text(encoding="utf-8"), "the training"


def test_a_written_directory_can_be_written_again(model_dir, pretrained):
    Transformer.from_pretrained(pretrained).save_pretrained(pretrained, model_dir)
    assert fasttfm.pipeline("translation", pretrained)(LINES[0])


def test_every_choice_of_a_model_survives(tmp_path):
    config = TransformerConfig(
        vocab_size=20, source_vocab_size=30, d_model=8, heads=2, d_ff=8, encoder_layers=1, decoder_layers=1,
        activation="silu", norm_first=True, final_norm=True, share_embeddings="none", output_bias=True,
        positional_encoding="tensor2tensor", first_position=2,
    )  # fmt: skip
    model = Transformer(config).eval()
    model.output.bias.data.normal_()
    model.save_pretrained(tmp_path / "model")
    source, target = torch.randint(1, 20, (2, 5)), torch.randint(1, 20, (2, 4))
    assert torch.equal(Transformer.from_pretrained(tmp_path / "model")(source, target), model(source, target))


def test_the_pipeline_answers_as_hugging_faces_did(pretrained):
    pipeline = fasttfm.pipeline("translation", pretrained)
    (one,) = pipeline(LINES[0])
    many = pipeline(LINES)
    assert one.keys() == {"translation_text"}
    assert many[0] == one
    assert [each["translation_text"] for each in many] == Translator.from_directory(pretrained).translate(LINES)
    several = fasttfm.pipeline("translation_en_to_de", pretrained, nbest=2)(LINES)
    assert [len(each) for each in several] == [2] * len(LINES)
    assert pipeline([]) == []
    with pytest.raises(UserError, match="summarization"):
        fasttfm.pipeline("summarization", pretrained)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", "is truncated at column 2"),
        ("config.json", '{"model_type": "bert"}', "fasttfm import"),
        ("config.json", '{"model_type": "fasttfm"}', "no vocab_size"),
        ("config.json", '{"model_type": "fasttfm", "vocab_size": 340, "heads": "x"}', "heads"),
        ("model.safetensors", "x" * 100, "is truncated"),
        ("spm.model", "x" * 100, "not a SentencePiece model"),
    ],
)
def test_what_is_damaged_is_told_in_a_line(tmp_path, pretrained, name, content, words):
    for file in pretrained.iterdir():
        if file.is_file() and file.name != "sha256sums":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words) as raised:
        Translator.from_directory(tmp_path)
    assert "\n" not in str(raised.value)
