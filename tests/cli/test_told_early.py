"""Contradictory options are refused in one line before any work, with status 2 and nothing written."""

import shutil

import pytest
from situations import COMMANDS, working_folder

from fasttfm.cli.main import main


@pytest.fixture(scope="module", name="world")
def world_with_lists(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists") / "world"
    shutil.copytree(world, folder, symlinks=True)
    (folder / "banned").write_text("bird\n")
    (folder / "terms").write_text("dog\tbird\n")
    return folder


TEXTS = ["prepare", *COMMANDS["prepare"].split()[:8]]
PREPARE = ["prepare", *COMMANDS["prepare"].split(), "fresh"]
TRAIN = ["train", *COMMANDS["train"].split(), "fresh"]
TRANSLATE = ["translate", *COMMANDS["translate"].split()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*TRANSLATE, "--split-sentences", "xx"], "is not a language"),
        (
            [*TRANSLATE, "--banned", "banned", "--terminology", "terms"],
            "--banned forbids every translation of the term",
        ),
        (
            [*TRANSLATE, "--alignment", "words", "--alignment-layer", "9"],
            "alignment_layer 9 is not there: the model has layers 1 to 1",
        ),
        ([*TRANSLATE, "--sampling-topp", "0.9"], "sampling_topp does nothing while sampling is false"),
        ([*TRANSLATE, "--diverse-beam-strength", "1"], "diverse_beam_strength does nothing while diverse_beam_groups"),
        ([*TRANSLATE, "--sampling", "--coverage-penalty", "1"], "coverage_penalty does nothing while sampling is true"),
        (
            [*TRANSLATE, "--mbr-samples", "4", "--coverage-penalty", "1"],
            "coverage_penalty does nothing while mbr_samples is 4",
        ),
        ([*TRANSLATE, "--sampling", "--beam", "8"], "beam does nothing while sampling is true"),
        ([*TRANSLATE, "--sampling", "--no-early-stopping"], "early_stopping does nothing while sampling is true"),
        ([*TRANSLATE, "--alignment-layer", "1"], "alignment_layer does nothing without alignment or coverage_penalty"),
        ([*TRANSLATE, "--length-penalty", "none", "--alpha", "2"], "alpha does nothing while length_penalty is none"),
        ([*TEXTS, "--spm", "data/spm.model", "--separate-vocab", "--out", "fresh"], "--separate-vocab needs two"),
        ([*PREPARE, "--spm", "data/spm.model"], "--spm and --vocab-size do not go together"),
        ([*PREPARE, "--mirror", "http://localhost"], "--mirror goes with --dataset"),
        ([*PREPARE, "--data-dir", "texts"], "--data-dir goes with --dataset"),
        ([*PREPARE, "--out", "other"], "--out was given twice"),
        ([*TRAIN, "--lr", "1e-3", "--schedule", "noam"], "lr does nothing while schedule is noam"),
        ([*TRAIN, "--no-valid-bleu", "--valid-beam", "4"], "valid_beam does nothing while valid_bleu is false"),
        (["score", "--ref", "valid.tgt", "--src", "valid.src", "--src", "valid.tgt"], "--src was given twice"),
        (["score", "--ref", "valid.tgt", "--test", "randomization"], "--test goes with --baseline"),
        (["score", "--ref", "valid.tgt", "--comet", "any"], "--comet goes with --src"),
        (["recipe", "multi30k", "--estimate", "100", "--dry-run"], "--estimate and --dry-run do not go together"),
        (["lm", "prepare", "--text", "train.src", "--bytes", "--vocab-size", "9", "--out", "x"], "do not go together"),
        ([*PREPARE, "--source-tag", "<s>", "--valid-source-tag", "<s>"], "is a reserved piece"),
        ([*PREPARE, "--source-tag", "\ud800", "--valid-source-tag", "a"], "a lone surrogate"),
        (["recipe", "multi30k", "--estimate", "1e-300"], "from 1 to 1,000,000,000,000"),
        (["recipe", "multi30k", "--estimate", "100", "--price", "-3"], "--price: '-3' was given, it must be from 0 to"),
        (["recipe", "multi30k", "--price", "3"], "goes with --estimate"),
    ],
)
def test_contradictory_options_are_refused_at_once(world, capfd, words, told):
    with working_folder(world):
        before = sorted(world.rglob("*"))
        assert main(words) == 2
        assert sorted(world.rglob("*")) == before
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert told in lines[0]


def test_groups_that_may_return_fewer_translations_are_reported(world, capfd, monkeypatch):
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one dog\n")))
    with working_folder(world):
        assert main([*TRANSLATE, "--beam", "4", "--diverse-beam-groups", "4", "--nbest", "4"]) == 0
    assert "a line has 1 to 4 translations" in capfd.readouterr().err
