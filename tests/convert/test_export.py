"""Exported models: the other tool translates as we do, as the command has found, and they can be imported again."""

import dataclasses

import pytest
import torch
from model_dirs import LINES, LONGEST, PAIRS, compare, write_model_dir

from fasttfm.cli.main import main
from fasttfm.convert import check, ctranslate2, ctranslate2_read, marian
from fasttfm.convert.exchange import load

PACKAGES = {"ctranslate2": "ctranslate2", "marian-hf": "transformers"}
BEAMS = {"ctranslate2": 2, "marian-hf": 4}
"""CTranslate2's is its default: its directories have no search settings."""
WRITERS = {"ctranslate2": ctranslate2, "marian-hf": marian}


def export(model_dir, form: str, *more: str):
    out = model_dir.parent / form
    assert main(["export", str(model_dir), "--format", form, "--out", str(out), *more]) == 0
    return out


def by_ctranslate2(folder, beam: int) -> list[str]:
    import ctranslate2
    import sentencepiece

    source, target = (
        sentencepiece.SentencePieceProcessor(str(folder / f"{side}.spm")) for side in ("source", "target")
    )
    results = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1).translate_batch(
        [source.encode(line, out_type=str) for line in LINES],
        beam_size=beam,
        max_decoding_length=LONGEST,
        length_penalty=0.0,
        disable_unk=True,
        suppress_sequences=[["<blank>"], ["<s>"]],
        **({"patience": 2} if beam > 1 else {}),
    )
    return [target.decode_pieces(each.hypotheses[0]).strip() for each in results]


def by_marian(folder, beam: int) -> list[str]:
    import transformers

    theirs = transformers.MarianMTModel.from_pretrained(folder)
    assert (theirs.generation_config.num_beams, theirs.generation_config.length_penalty) == (4, 0.0)
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    inputs = tokenizer(LINES, return_tensors="pt", padding=True)
    with torch.inference_mode():
        result = theirs.generate(
            **inputs, num_beams=beam, max_new_tokens=LONGEST + 1, min_new_tokens=2, max_length=None
        )  # fmt: skip
    return tokenizer.batch_decode(result, skip_special_tokens=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("ctranslate2", {"share_embeddings": "decoder", "activation": "gelu_tanh", "decoder_layers": 3,
                         "positional_encoding": "learned", "max_length": 48}),
        ("ctranslate2", {}),
        ("ctranslate2", {"norm_first": True, "final_norm": True, "positional_encoding": "tensor2tensor",
                         "activation": "gelu"}),
        ("ctranslate2", {"norm_first": True, "layer_norm_eps": 1e-6}),
        ("ctranslate2", {"share_embeddings": "none", "activation": "silu", "first_position": 2, "output_bias": True}),
        ("marian-hf", {}),
        ("marian-hf", {"share_embeddings": "decoder"}),
        ("marian-hf", {"activation": "silu", "output_bias": True}),
    ],
)  # fmt: skip
def test_the_other_tool_translates_as_we_do_and_the_model_comes_back(tmp_path, capsys, form, fields):
    pytest.importorskip(PACKAGES[form])
    model_dir = write_model_dir(tmp_path / "model", **fields)
    told = f"note: 3 texts are translated as {PACKAGES[form]} translates them"
    folder = export(model_dir, form)
    assert told in capsys.readouterr().out.splitlines()
    for beam in (1, 4):
        compare(model_dir, {"ctranslate2": by_ctranslate2, "marian-hf": by_marian}[form](folder, beam), beam)
    assert main(["import", str(folder), "--format", form, "--out", str(tmp_path / "back")]) == 0
    notes = capsys.readouterr().out.splitlines()[1:]
    assert told in notes
    card = (tmp_path / "back" / "README.md").read_text(encoding="utf-8").splitlines()
    assert {f"- imported from {form} ({form})", *(line.replace("note: ", "- ") for line in notes)} <= {*card}
    assert load(tmp_path / "back").decoding.beam == BEAMS[form]
    if form == "ctranslate2":
        given, back = load(model_dir), ctranslate2_read.read(folder)
        sizes = {"max_length": back.config.max_length, "source_vocab_size": back.config.source_vocab_size}
        assert back.config == dataclasses.replace(given.config, **sizes, dropout=0.1)
        torch.testing.assert_close(back.weights, given.weights)


@pytest.mark.parametrize("form", PACKAGES)
def test_a_model_that_differs_in_one_weight_is_not_written(tmp_path, refusal_of, monkeypatch, form):
    pytest.importorskip(PACKAGES[form])
    write = WRITERS[form].export

    def wrong(model, folder):
        told, weight = write(model, folder), model.weights["decoder.layers.1.linear2.weight"]
        weight.copy_(torch.randn_like(weight))
        return told

    monkeypatch.setattr(WRITERS[form], "export", wrong)
    model_dir = write_model_dir(tmp_path / "model", d_model=64)
    line = refusal_of(["export", model_dir, "--format", form, "--out", tmp_path / form])
    assert f"{PACKAGES[form]} translates" in line
    assert not (tmp_path / form).exists()
    export(model_dir, form, "--no-check")


def test_a_hundred_lines_of_its_validation_are_compared_where_they_are_there(tmp_path):
    pytest.importorskip("ctranslate2")
    model_dir = write_model_dir(tmp_path / "model")
    (tmp_path / "valid.en").write_text("".join(f"{line}\n" for line in [*PAIRS] * 120), encoding="utf-8")
    (model_dir / "data.yaml").write_text(f"files: [a, b, {tmp_path / 'valid.en'}, c]\n", encoding="utf-8")
    card = (export(model_dir, "ctranslate2") / "README.md").read_text(encoding="utf-8")
    assert "100 texts are translated as ctranslate2" in card


def test_a_tool_that_is_not_installed_is_reported(tmp_path, capsys, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    export(write_model_dir(tmp_path / "model", trained=False), "ctranslate2")
    assert "note: not compared with ctranslate2, which is not installed" in capsys.readouterr().out.splitlines()


def test_settings_survive_a_way_to_hugging_face_and_back(tmp_path):
    rates = {"dropout": 0.1, "attention_dropout": 0.2, "relu_dropout": 0.3}
    model_dir = write_model_dir(tmp_path / "model", trained=False, no_repeat_ngram=3, beam=5, min_len=4, **rates)
    model = marian.read(export(model_dir, "marian-hf", "--no-check"))
    search = model.decoding
    assert (search.no_repeat_ngram, search.beam, search.allow_unk, search.min_len) == (3, 5, False, 4)
    assert {name: getattr(model.config, name) for name in rates} == rates


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm_first", True), ("positional_encoding", "tensor2tensor"), ("layer_norm_eps", 1e-6),
     ("share_embeddings", "none")],
)  # fmt: skip
def test_models_that_marian_cannot_represent_are_refused(tmp_path, refusal_of, field, value):
    model_dir = write_model_dir(tmp_path / "model", trained=False, **{field: value})
    assert field in refusal_of(["export", model_dir, "--format", "marian-hf", "--out", tmp_path / "out"])
    assert not (tmp_path / "out").exists()
