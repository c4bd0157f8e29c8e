"""Folders that go to transformers or come from there are scored there and here, and one that differs is not written."""

import pytest
import torch
from convert.exporters import COMMANDS, export_words, write_model
from safetensors.torch import load_file, save_file

from fasttfm.cli.main import main
from fasttfm_pretraining.interop import check

pytest.importorskip("transformers")


def export(kind, model, there) -> list[str]:
    return [word for word in export_words(kind, model, there) if word != "--no-check"]


TOLD = "note: 3 texts are scored as transformers scores them"


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", COMMANDS)
def test_both_ways_end_in_a_comparison(kind, tmp_path, capsys):
    model, there, back = tmp_path / "model", tmp_path / "there", tmp_path / "back"
    write_model(kind, model)
    assert main(export(kind, model, there)) == 0
    assert TOLD in capsys.readouterr().out.splitlines()
    words = [COMMANDS[kind], "import", str(there / "discriminator" if kind == "electra" else there)]
    words += ["--generator", str(there / "generator")] if kind == "electra" else []
    assert main([*words, "--out", str(back)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told.count(TOLD) == (2 if kind == "electra" else 1)
    assert main(export_words(kind, model, tmp_path / "unchecked")) == 0
    assert TOLD not in capsys.readouterr().out.splitlines()


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", sorted(COMMANDS, reverse=True))  # ELECTRA is among the four
def test_a_folder_that_is_scored_otherwise_is_refused(kind, tmp_path, capsys, monkeypatch):
    """Their class is given a folder with one weight changed."""
    model, there = tmp_path / "model", tmp_path / "there"
    write_model(kind, model)
    compare = check._their_scores

    def of_another(folder, *rest):
        path = folder / "model.safetensors"
        weights = load_file(path)
        name = next(name for name in sorted(weights) if weights[name].dim() == 2 and "embed" not in name)
        save_file({**weights, name: torch.randn_like(weights[name])}, path, {"format": "pt"})
        return compare(folder, *rest)

    monkeypatch.setattr(check, "_their_scores", of_another)
    assert main(export(kind, model, there)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "of three texts are not those of this model here: report it" in line
    assert not there.exists()
