"""Import of every converter's output in every quantization: translations and scores equal CTranslate2's."""

import json
import shutil

import pytest
import torch
from model_dirs import LINES

from fasttfm.cli.main import main
from fasttfm.config.decoding import DecodingConfig
from fasttfm.convert.ctranslate2_read import read, vocabulary
from fasttfm.convert.exchange import load
from fasttfm.data.tokenizer import BOS, EOS, PAD, train_tokenizer
from fasttfm.models import Transformer
from fasttfm.search.search import search_ids
from fasttfm.system.files import read_json
from fasttfm.translate import Translator

from .their_converters import TRANSLATION, converted

ctranslate2 = pytest.importorskip("ctranslate2")
pytest.importorskip("transformers")
QUANTIZATIONS = (None, *ctranslate2.specs.model_spec.ACCEPTED_MODEL_TYPES)
LONGEST = 12
CLOSE = {"float16": 0.02, "bfloat16": 0.15}
"""Tolerance of log-probabilities if positions were rounded, because we recompute sinusoids; otherwise 1e-4."""


@pytest.mark.sample(6)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("name", TRANSLATION)
def test_translations_and_scores_equal_ctranslate2_s(name, quantization, tmp_path, monkeypatch):
    compare(converted(name, tmp_path, monkeypatch, quantization), CLOSE.get(str(quantization).rpartition("_")[2], 1e-4))


@pytest.mark.parametrize(("name", "how"), [("opennmt_py", {"start": "</s>"}), ("opennmt_tf", {"end": True})])
def test_sources_have_an_end_token_if_the_model_was_trained_with_one(name, how, tmp_path, monkeypatch):
    """OpenNMT's sources have no end token unless the model was trained with one."""
    folder = converted(name, tmp_path, monkeypatch, **how)
    assert read(folder).source_tokenizer.source_end == [EOS]
    compare(folder)
    (tmp_path / "other").mkdir()
    with_end, without = tmp_path / "with", converted(name, tmp_path / "other", monkeypatch)
    shutil.copytree(without, with_end)
    assert not read(without).source_tokenizer.source_end
    path = with_end / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "add_source_eos": True}))
    assert read(with_end).source_tokenizer.source_end == [EOS]
    compare(with_end)


def test_a_model_without_source_end_translates_and_exports_but_cannot_be_trained(
    tmp_path, monkeypatch, capsys, refusal_of
):
    model, there = tmp_path / "model", tmp_path / "there"
    given = converted("opennmt_py", tmp_path, monkeypatch)
    assert main(["import", str(given), "--format", "ctranslate2", "--out", str(model)]) == 0
    assert "sources have no end token" in capsys.readouterr().out
    ours = Translator.from_directory(model)
    assert not ours.source_tokenizer.source_end
    assert EOS not in ours.encode_lines(LINES, range(len(LINES)))[0]
    assert ours.translate(["", "a dog"])[0] == ""
    assert ours.score(["", "a dog"], ["", "ein Hund"])[0] < 0
    assert main(["export", str(model), "--format", "ctranslate2", "--out", str(there)]) == 0
    assert "3 texts are translated as" in capsys.readouterr().out
    assert load(model).weights.keys() == read(there).weights.keys()
    assert "sources without an end" in refusal_of(["export", model, "--format", "marian-hf", "--out", tmp_path / "hf"])
    (tmp_path / "t").write_text("a dog\n" * 9)
    words = ["prepare", *(f"--{each}={tmp_path / 't'}" for each in ("src", "tgt", "valid-src", "valid-tgt"))]
    told = refusal_of([*words, "--spm", model / "spm.src.model", "--out", tmp_path / "data"])
    assert "its sources have no end-of-sentence token" in told


def compare(folder, close: float = 1e-4) -> None:
    """Compare tokens and scores of three translations with CTranslate2's."""
    model = read(folder)
    network = Transformer(model.config)
    network.load_state_dict(model.weights, strict=False)
    network.eval()
    ids = [model.source_tokenizer.encode(line) for line in LINES[:3]]
    greedy = DecodingConfig(beam=1, length_penalty="none", max_len_a=0.0, max_len_b=LONGEST, allow_unk=True)
    end = model.source_tokenizer.source_end
    ours = [found[0].tokens for found in search_ids(network, [[*each, *end] for each in ids], greedy)]

    source, target = (each.pieces(range(len(each))) for each in (model.source_tokenizer, model.target_tokenizer))
    theirs = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    adds_end = read_json(folder / "config.json")["add_source_eos"]
    sources = [[source[number] for number in (each if adds_end else [*each, *end])] for each in ids]
    their_pieces = vocabulary(folder, "target")
    never = [[target[number]] for number in (PAD, BOS) if target[number] in their_pieces]
    answers = theirs.translate_batch(
        sources, beam_size=1, max_decoding_length=LONGEST, suppress_sequences=never or None
    )
    targets = [[target[number] for number in each] for each in ours]
    for answer, written in zip(answers, targets, strict=True):
        assert answer.hypotheses[0][: LONGEST - 1] == written[: LONGEST - 1]
    for score, each, tokens in zip(theirs.score_batch(sources, targets), ids, ours, strict=True):
        with torch.inference_mode():
            logits = network(torch.tensor([[*each, *end]]), torch.tensor([[BOS, *tokens]]))[0]
        log_probabilities = logits.log_softmax(-1)[range(len(tokens) + 1), [*tokens, EOS]]
        torch.testing.assert_close(torch.tensor(score.log_probs), log_probabilities, rtol=1e-4, atol=close)


def test_another_model_s_sentencepiece_model_is_refused(tmp_path, monkeypatch, refusal_of):
    other = train_tokenizer(["日本語の文字ばかりの文章です", "次の行もそうです"], vocab_size=285)
    folder = converted("opus_mt", tmp_path, monkeypatch)
    (folder / "target.spm").write_bytes(other.model)
    words = ["import", folder, "--format", "ctranslate2", "--out", tmp_path / "MODEL"]
    assert "target.spm: 4% of its pieces are in the vocabulary, 50% are needed" in refusal_of(words)
    smaller = train_tokenizer(LINES, vocab_size=290)  # has only a part of the vocabulary's pieces
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(smaller.model)
    assert "have 31% of the vocabulary's pieces, 85% are needed: one of them belongs to another" in refusal_of(words)
    path = folder / "shared_vocabulary.json"
    listed = json.loads(path.read_text())
    path.write_text(json.dumps([*listed[:-1], listed[-2]]))
    assert f"shared_vocabulary.json: has {listed[-2]!r} twice" in refusal_of(words)
