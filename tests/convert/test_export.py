"""Exported models, loaded by the other tool, translate as they do here."""

import random

import pytest
import torch
from docs.blocks import blocks, run
from model_dirs import LINES, LONGEST, PAIRS, compare, write_model_dir

from fasttfm.cli.main import main
from fasttfm.convert import marian
from fasttfm.convert.channels import halves_from_pairs, pairs_from_halves
from fasttfm.convert.exchange import load
from fasttfm.translate import Translator

ARCHITECTURES = {
    "post-norm": {},
    "pre-norm": {"norm_first": True, "final_norm": True, "positional_encoding": "tensor2tensor", "activation": "gelu"},
    "without final norms": {"norm_first": True, "layer_norm_eps": 1e-6},
    "learned positions": {"positional_encoding": "learned", "max_length": 48},
    "three tables": {"share_embeddings": "none", "activation": "silu", "first_position": 2, "output_bias": True},
}


def export(model_dir, form: str):
    out = model_dir.parent / form
    assert main(["export", str(model_dir), "--format", form, "--out", str(out)]) == 0
    return out


def by_ctranslate2(folder, beam: int) -> list[str]:
    ctranslate2 = pytest.importorskip("ctranslate2")
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ctranslate2_translates_as_we_do(tmp_path, name):
    model_dir = write_model_dir(tmp_path / "model", **ARCHITECTURES[name])
    folder = export(model_dir, "ctranslate2")
    for beam in (1, 4):
        compare(model_dir, by_ctranslate2(folder, beam), beam)


def test_the_documented_settings_give_the_same_search(tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    draw = random.Random(1)
    words = [word for line in PAIRS for word in line.split()]
    lines = [*PAIRS, *(" ".join(draw.choices(words, k=draw.randint(1, 6))) for _ in range(200))]
    (tmp_path / "valid.en").write_text("\n".join(lines), encoding="utf-8")
    model_dir = write_model_dir(tmp_path / "model", max_len_a=0.0)
    (model_dir / "data.yaml").write_text(f"files: [a, b, {tmp_path / 'valid.en'}, c]\n", encoding="utf-8")
    export(model_dir, "ctranslate2").rename(tmp_path / "CT2")
    assert "100 texts are translated as ctranslate2" in (tmp_path / "CT2/README.md").read_text(encoding="utf-8")
    (code,) = (block for block in blocks("export.md") if "translate_batch" in block)
    monkeypatch.chdir(tmp_path)
    names = run(code, tmp_path)
    pieces = [names["source"].encode(line, out_type=str) for line in lines]
    results = names["translator"].translate_batch(
        pieces, suppress_sequences=[["<blank>"], ["<s>"]], max_decoding_length=LONGEST, **names["same"]
    )
    theirs = [names["target"].decode(each.hypotheses[0]).strip() for each in results]
    translator = Translator.from_directory(
        model_dir, workers=1, beam=4, length_penalty="power", alpha=1.0, early_stopping=True
    )
    ours = translator.translate(lines)
    equal = sum(one.strip() == other for one, other in zip(ours, theirs, strict=True))
    assert equal >= 0.95 * len(lines), f"{equal} of {len(lines)}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("fields", [{}, {"activation": "silu", "output_bias": True}, {"share_embeddings": "decoder"}])
def test_hugging_face_translates_as_we_do(tmp_path, fields):
    transformers = pytest.importorskip("transformers")
    model_dir = write_model_dir(tmp_path / "model", **fields)
    folder = export(model_dir, "marian-hf")
    theirs = transformers.MarianMTModel.from_pretrained(folder)
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    for beam in (1, 4):
        inputs = tokenizer(LINES, return_tensors="pt", padding=True)
        with torch.inference_mode():
            result = theirs.generate(
                **inputs, num_beams=beam, max_new_tokens=LONGEST + 1, min_new_tokens=2, max_length=None
            )
        compare(model_dir, tokenizer.batch_decode(result, skip_special_tokens=True), beam)
    assert theirs.generation_config.num_beams == 4
    assert theirs.generation_config.length_penalty == 0.0


def test_settings_survive_a_way_to_hugging_face_and_back(tmp_path):
    rates = {"dropout": 0.1, "attention_dropout": 0.2, "relu_dropout": 0.3}
    model_dir = write_model_dir(tmp_path / "model", trained=False, no_repeat_ngram=3, beam=5, min_len=4, **rates)
    out = tmp_path / "out"
    assert main(["export", str(model_dir), "--format", "marian-hf", "--out", str(out), "--no-check"]) == 0
    model = marian.read(out)
    search = model.decoding
    assert (search.no_repeat_ngram, search.beam, search.allow_unk, search.min_len) == (3, 5, False, 4)
    assert {name: getattr(model.config, name) for name in rates} == rates


@pytest.mark.parametrize("form", ["ctranslate2", "marian-hf"])
def test_search_settings_that_are_not_recorded_are_told(tmp_path, form):
    pytest.importorskip("ctranslate2")
    others = {"diverse_beam_groups": 2, "coverage_penalty": 0.2}
    model_dir = write_model_dir(tmp_path / "model", trained=False, min_len=4, beam=6, **others)
    assert main(["export", str(model_dir), "--format", form, "--out", str(tmp_path / "out"), "--no-check"]) == 0
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    (told,) = (line for line in card.splitlines() if "left out its search settings" in line)
    assert all(f"{name} {value}" in told for name, value in others.items())
    assert "beam" not in told.replace("diverse_beam", "")
    same = "beam_size=6, length_penalty=0.0, min_decoding_length=4, no_repeat_ngram_size=0, disable_unk=True"
    assert (same in card) is (form == "ctranslate2")


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm_first", True), ("positional_encoding", "tensor2tensor"), ("layer_norm_eps", 1e-6),
     ("share_embeddings", "none")],
)  # fmt: skip
def test_models_that_marian_cannot_represent_are_refused(tmp_path, refusal_of, field, value):
    model_dir = write_model_dir(tmp_path / "model", trained=False, **{field: value})
    assert field in refusal_of(["export", model_dir, "--format", "marian-hf", "--out", tmp_path / "out"])
    assert not (tmp_path / "out").exists()


def test_another_order_of_channels_is_undone_by_its_inverse(tmp_path):
    model = load(write_model_dir(tmp_path / "model", trained=False))
    halves = halves_from_pairs(model.weights, 32)
    assert not torch.equal(halves["encoder.layers.0.linear2.weight"], model.weights["encoder.layers.0.linear2.weight"])
    restored = pairs_from_halves(halves, 32)
    assert all(torch.equal(restored[name], weight) for name, weight in model.weights.items())
