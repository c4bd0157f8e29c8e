"""`fasttfm shortlist`, and translations restricted by its map."""

import json

import pytest
from model_dirs import LINES, PAIRS, write_model_dir

from fasttfm.cli.main import main
from fasttfm.translate import Translator


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and prepared data of the sentences that it was trained on."""
    folder = tmp_path_factory.mktemp("shortlist")
    model, text = write_model_dir(folder / "model"), []
    for side, lines in (("src", PAIRS), ("tgt", PAIRS.values())):
        (folder / f"train.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        text += [f"--{prefix}{side}={folder / f'train.{side}'}" for prefix in ("", "valid-")]
    assert main(["prepare", *text, "--spm", str(model / "spm.model"), "--out", str(folder / "data")]) == 0
    return folder


def test_translations_use_only_tokens_of_the_map(folder, capsys):
    model = folder / "model"
    assert main(["shortlist", str(model), "--data", str(folder / "data"), "--best=8", "--frequent=3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == str(model / "vmap.txt")
    assert told["tokens_kept"] < told["vocabulary"] / 2
    free = Translator.from_directory(model, workers=1)
    kept = Translator.from_directory(model, workers=1, shortlist=told["out"])
    assert kept.translate([*PAIRS]) == free.translate([*PAIRS])
    for line, text in zip(LINES, kept.translate(LINES), strict=True):
        allowed = kept.shortlist.tokens(kept.source_tokenizer.encode(line))
        assert set(kept.target_tokenizer.encode(text)) <= set(allowed)


def test_what_does_not_fit_is_one_line(folder, tmp_path, refusal_of):
    other = write_model_dir(tmp_path / "other", trained=False)
    (other / "spm.model").write_bytes((other / "spm.model").read_bytes() + b"\n")
    for model, more, message in (
        (other, [], "has another vocabulary than"),
        (folder / "data", [], "not a model directory"),
        (folder / "model", ["--best", 0], "--best: '0' was given"),
    ):
        assert message in refusal_of(["shortlist", model, "--data", folder / "data", *more])
