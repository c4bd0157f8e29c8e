"""docs/export.md and translate.md: their Python runs on a model and its exports."""

import pytest
from model_dirs import write_model_dir

from fasttfm.cli.main import main

from .blocks import blocks, run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working directory with MODEL."""
    write_model_dir(tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_of_the_export_page_runs_after_its_commands(folder):
    pytest.importorskip("ctranslate2")
    pytest.importorskip("transformers")
    for form, out in (("ctranslate2", "CT2"), ("pretrained", "PRETRAINED")):
        assert main(["export", "MODEL", "--format", form, "--out", out]) == 0
    names = run("\n".join(blocks("export.md")), folder)
    assert names["results"][0].hypotheses[0]
    assert names["model"].generate


def test_the_python_of_the_translate_page_prints_a_translation(folder, capsys):
    run("\n".join(blocks("translate.md")), folder)
    assert capsys.readouterr().out.strip()
