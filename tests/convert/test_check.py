"""Imports and exports are compared with the other tool; one that differs is not written."""

import pytest
import torch
from model_dirs import write_model_dir

from fasttfm.cli.main import main
from fasttfm.convert import check, ctranslate2, marian
from fasttfm.convert.exchange import load
from fasttfm.data.tokenizer import EOS
from fasttfm.store.checkpoint import read_weights, save_checkpoint
from fasttfm.store.steps import step_folder

PACKAGES = {"ctranslate2": "ctranslate2", "marian-hf": "transformers"}
BEAMS = {"ctranslate2": 2, "marian-hf": 4}
"""CTranslate2's is its default: its directories have no search settings."""
WRITERS = {"ctranslate2": ctranslate2, "marian-hf": marian}


def command(*words) -> int:
    return main(list(map(str, words)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", PACKAGES)
@pytest.mark.parametrize("fields", [{}, {"activation": "silu", "output_bias": True}, {"share_embeddings": "decoder"}])
def test_export_and_import_report_a_comparison(tmp_path, capsys, form, fields):
    pytest.importorskip(PACKAGES[form])
    model_dir = write_model_dir(tmp_path / "model", **fields)
    told = f"note: 3 texts are translated as {PACKAGES[form]} translates them"
    assert command("export", model_dir, "--format", form, "--out", tmp_path / "there") == 0
    assert told in capsys.readouterr().out.splitlines()
    assert command("import", tmp_path / "there", "--format", form, "--out", tmp_path / "back") == 0
    notes = capsys.readouterr().out.splitlines()[1:]
    assert told in notes
    assert load(tmp_path / "back").decoding.beam == BEAMS[form]
    card = (tmp_path / "back" / "README.md").read_text(encoding="utf-8").splitlines()
    assert f"- imported from there ({form})" in card
    for line in notes:
        assert line.replace("note: ", "- ") in card


@pytest.mark.parametrize("form", [*PACKAGES, "onnx"])
def test_a_model_that_ends_every_translation_at_once_does_so_in_both(tmp_path, capsys, form):
    """As after a few updates; our search alone would choose another first word."""
    for package in ("onnxruntime", "onnxscript") if form == "onnx" else (PACKAGES[form],):
        pytest.importorskip(package)
    model_dir = write_model_dir(tmp_path / "model", trained=False, output_bias=True)
    weights = read_weights(step_folder(model_dir, 1))
    weights["output.bias"][EOS] = 1e3
    save_checkpoint(step_folder(model_dir, 1), weights, {"step": 1, "best_step": 1})
    assert command("export", model_dir, "--format", form, "--out", tmp_path / "there") == 0
    assert "note: 3 texts are translated as" in capsys.readouterr().out


def test_graphs_are_compared_with_onnxruntime(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model_dir = write_model_dir(tmp_path / "model", trained=False, encoder_layers=1, output_bias=True)
    assert command("export", model_dir, "--format", "onnx", "--out", tmp_path / "there") == 0
    assert "note: 3 texts are translated as onnxruntime translates them" in capsys.readouterr().out.splitlines()


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", PACKAGES)
@pytest.mark.parametrize(
    "part",
    ["encoder.layers.0.self_attn.in_proj_weight", "decoder.layers.1.linear2.weight",
     "decoder.layers.0.multihead_attn.out_proj.weight"],
)  # fmt: skip
def test_a_model_that_differs_in_one_weight_is_not_written(tmp_path, refusal_of, monkeypatch, form, part):
    pytest.importorskip(PACKAGES[form])
    export = WRITERS[form].export

    def wrong(model, folder):
        torch.manual_seed(0)
        weight = model.weights[part].clone()
        told = export(model, folder)
        model.weights[part].copy_(torch.randn_like(weight))
        return told

    monkeypatch.setattr(WRITERS[form], "export", wrong)
    words = ["export", write_model_dir(tmp_path / "model", d_model=64), "--format", form, "--out", tmp_path / "there"]
    line = refusal_of(words)
    assert f"{PACKAGES[form]} translates" in line
    assert "--no-check skips the comparison" in line
    assert not (tmp_path / "there").exists()
    assert command(*words, "--no-check") == 0


def test_a_tool_that_is_not_installed_is_reported(tmp_path, capsys, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    model_dir = write_model_dir(tmp_path / "model", trained=False)
    assert command("export", model_dir, "--format", "ctranslate2", "--out", tmp_path / "there") == 0
    assert "note: not compared with ctranslate2, which is not installed" in capsys.readouterr().out.splitlines()
