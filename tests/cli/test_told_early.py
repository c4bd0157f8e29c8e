"""Contradictory and impossible options are refused in one line before any work, and nothing is written."""

import io
import re
import sys
from pathlib import Path

import pytest
from any_command import PARSERS
from situations import COMMANDS, working_folder

from fasttfm.cli.main import main
from fasttfm.cli.train import _FAIRSEQ
from fasttfm.config import all_fields

TEXTS = ["prepare", *COMMANDS["prepare"].split()[:8]]
PREPARE = ["prepare", *COMMANDS["prepare"].split(), "fresh"]
TRAIN = ["train", *COMMANDS["train"].split(), "fresh"]
TRANSLATE = ["translate", *COMMANDS["translate"].split()]
SHORT = ["train", "--preset", "demo", "--max-update", "150"]
PLOT = ["plot", "model", "--out", "picture.png", "--attention"]
SCORE = ["score", "--ref", "valid.tgt"]
DEVICES = ("gpu", "meta", "cuda:99", "cpu:x", "hpu", "privateuseone", "mkldnn", "opengl", "ideep", "vulkan", "xla")
"""None of this machine's."""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*TRANSLATE, "--split-sentences", "xx"], "is not a language"),
        ([*TRANSLATE, "--banned", "banned", "--terminology", "terms"], "--banned forbids every translation of"),
        ([*TRANSLATE, "--alignment", "words", "--alignment-layer", "9"], "is not there: the model has layers 1 to 1"),
        ([*TRANSLATE, "--sampling-topp", "0.9"], "sampling_topp does nothing while sampling is false"),
        ([*TRANSLATE, "--diverse-beam-strength", "1"], "diverse_beam_strength does nothing while diverse_beam_groups"),
        ([*TRANSLATE, "--sampling", "--coverage-penalty", "1"], "coverage_penalty does nothing while sampling is true"),
        ([*TRANSLATE, "--mbr-samples", "4", "--coverage-penalty", "1"], "does nothing while mbr_samples is 4"),
        ([*TRANSLATE, "--alignment-layer", "1"], "alignment_layer does nothing without alignment or coverage_penalty"),
        ([*TRANSLATE, "--length-penalty", "none", "--alpha", "2"], "alpha does nothing while length_penalty is none"),
        ([*TEXTS, "--spm", "data/spm.model", "--separate-vocab", "--out", "fresh"], "--separate-vocab needs two"),
        ([*PREPARE, "--spm", "data/spm.model"], "--spm and --vocab-size do not go together"),
        ([*PREPARE, "--mirror", "http://localhost"], "--mirror goes with --dataset"),
        ([*PREPARE, "--out", "other"], "--out was given twice"),
        ([*PREPARE, "--source-tag", "<s>", "--valid-source-tag", "<s>"], "is a reserved piece"),
        ([*PREPARE, "--source-tag", "\ud800", "--valid-source-tag", "a"], "a lone surrogate"),
        ([*TRAIN, "--lr", "1e-3", "--schedule", "noam"], "lr does nothing while schedule is noam"),
        ([*TRAIN, "--no-valid-bleu", "--valid-beam", "4"], "valid_beam does nothing while valid_bleu is false"),
        ([*SCORE, "--src", "valid.src", "--src", "valid.tgt"], "--src was given twice"),
        ([*SCORE, "--test", "randomization"], "--test goes with --baseline"),
        ([*SCORE, "--comet", "any"], "--comet goes with --src"),
        (["lm", "prepare", "--text", "train.src", "--bytes", "--vocab-size", "9", "--out", "x"], "do not go together"),
        (["recipe", "multi30k", "--estimate", "100", "--dry-run"], "--estimate and --dry-run do not go together"),
        (["recipe", "multi30k", "--estimate", "1e-300"], "from 1 to 1,000,000,000,000"),
        (["recipe", "multi30k", "--estimate", "100", "--price", "-3"], "--price: '-3' was given, it must be from 0 to"),
        (["recipe", "multi30k", "--price", "3"], "goes with --estimate"),
        *((["train", flag, "transformer"], _FAIRSEQ[flag]) for flag in ("--arch", "--fp16", "--save-dir")),
        (["train", "--preset", "demo"], "--data is missing"),
        (["train", "--d-modle", "8"], "did you mean --d-model?"),
        (["train", "--lr", "-1", "--dump-config"], "--lr -1.0"),
        (["train", "--schedule", "noam", "--resume-with", "lr=1", "--dump-config"], "lr does nothing while"),
        ([*TRANSLATE, "--checkpoint", "9" * 5000], "9999"),
        ([*SHORT, "--warmup-updates", "200", "--dump-config"], "such as 15"),
        (["recipe", "wmt99"], "wmt99: one of paper-base-en-de"),
        *((["tune", "--device", device], "fasttfm tune: device ") for device in DEVICES),
        ([*PLOT, "Hund \udcff"], "the sentence 'Hund \\udcff' is not valid UTF-8"),
        ([*PLOT, "\u00a0\u3000 \t"], "is empty"),
        ([*PLOT, "dog " * 100], "give a shorter one"),
        ([*PLOT, "one", "--layers", "3"], "layers 1 to 1"),
        ([*PLOT, "one", "--layers", "one"], "give numbers"),
        ([*PLOT, "one", "--over", "minutes"], "do not go together"),
        (["plot", "model", "--out", "x.docx", "--attention", "one"], "docx"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(world, refusal_of, words, told):
    with working_folder(world):
        before = sorted(world.rglob("*"))
        assert told in refusal_of(words)
        assert sorted(world.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        "prepare --src loop --tgt loop --valid-src loop --valid-tgt loop --out new",
        "lm prepare --text loop --vocab-size 300 --out new",
        "plot loop --out new.png",
        "serve loop --port 0",
    ],
)
def test_a_link_to_itself_is_refused(tmp_path, monkeypatch, refusal_of, words):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert "loop" in refusal_of(words.split())
    assert [each.name for each in tmp_path.iterdir()] == ["loop"]


def test_groups_that_may_return_fewer_translations_are_reported(world, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one dog\n")))
    with working_folder(world):
        assert main([*TRANSLATE, "--beam", "4", "--diverse-beam-groups", "4", "--nbest", "4"]) == 0
    assert "a line has 1 to 4 translations" in capfd.readouterr().err


def test_the_page_of_fairseqs_flags_lists_all_and_names_what_exists():
    page = (Path(__file__).parents[2] / "docs" / "from-fairseq.md").read_text(encoding="utf-8")
    assert [flag for flags in _FAIRSEQ for flag in flags.split() if f"| `{flag}` |" not in page] == []
    advised = {flag for told in _FAIRSEQ.values() for flag in re.findall(r"give (--[a-z-]+)", told)}
    assert advised <= PARSERS["train"]._option_string_actions.keys()
    same = page.split("same name and meaning: `")[1].split("`.")[0].split()
    assert {flag[2:].replace("-", "_") for flag in same} <= {*all_fields()}
