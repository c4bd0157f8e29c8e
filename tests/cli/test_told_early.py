"""Contradictory and impossible options are refused in one line before any work, and nothing is written."""

import re
from pathlib import Path

import pytest
from any_command import PARSERS
from situations import COMMANDS, working_folder

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
        ([*TRANSLATE, "--alignment-layer", "1"], "alignment_layer does nothing without alignment or coverage_penalty"),
        ([*TEXTS, "--spm", "data/spm.model", "--separate-vocab", "--out", "fresh"], "--separate-vocab needs two"),
        ([*PREPARE, "--spm", "data/spm.model"], "--spm and --vocab-size do not go together"),
        ([*PREPARE, "--mirror", "http://localhost"], "--mirror goes with --dataset"),
        ([*PREPARE, "--out", "other"], "--out was given twice"),
        ([*PREPARE, "--source-tag", "<s>", "--valid-source-tag", "<s>"], "is a reserved piece"),
        ([*TRAIN, "--workers", "time", "--threads", "2"], "leave --threads out"),
        ([*TRAIN, "--lr", "1e-3", "--schedule", "noam"], "lr does nothing while schedule is noam"),
        ([*SCORE, "--src", "valid.src", "--src", "valid.tgt"], "--src was given twice"),
        ([*SCORE, "--test", "randomization"], "--test goes with --baseline"),
        ([*SCORE, "--comet", "any"], "--comet goes with --src"),
        (["lm", "prepare", "--text", "train.src", "--bytes", "--vocab-size", "9", "--out", "x"], "do not go together"),
        (["recipe", "multi30k", "--estimate", "100", "--dry-run"], "--estimate and --dry-run do not go together"),
        (["recipe", "multi30k", "--estimate", "100", "--price", "-3"], "--price: '-3' was given, it must be from 0 to"),
        *((["train", flag, "transformer"], _FAIRSEQ[flag]) for flag in ("--arch", "--fp16", "--save-dir")),
        (["train", "--preset", "demo"], "--data is missing"),
        (["train", "--d-modle", "8"], "did you mean --d-model?"),
        (["trian"], "fasttfm: trian is unknown: did you mean train? fasttfm --help"),
        (["train", "--lr", "-1", "--dump-config"], "--lr -1.0"),
        ([*TRANSLATE, "--checkpoint", "9" * 5000], "9999"),
        ([*SHORT, "--warmup-updates", "200", "--dump-config"], "such as 15"),
        (["recipe", "wmt99"], "wmt99: one of paper-base-en-de"),
        *((["tune", "--device", device], "fasttfm tune: device ") for device in DEVICES),
        ([*PLOT, "Hund \udcff"], "the sentence 'Hund \\udcff' is not valid UTF-8"),
        ([*PLOT, "dog " * 100], "give a shorter one"),
        ([*PLOT, "one", "--layers", "3"], "layers 1 to 1"),
        (["plot", "model", "--out", "x.docx", "--attention", "one"], "docx"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(world, refusal_of, words, told):
    with working_folder(world):
        before = sorted(world.rglob("*"))
        assert told in refusal_of(words)
        assert sorted(world.rglob("*")) == before


def test_the_page_of_fairseqs_flags_lists_all_and_names_what_exists():
    page = (Path(__file__).parents[2] / "docs" / "from-fairseq.md").read_text(encoding="utf-8")
    assert [flag for flags in _FAIRSEQ for flag in flags.split() if f"| `{flag}` |" not in page] == []
    advised = {flag for told in _FAIRSEQ.values() for flag in re.findall(r"give (--[a-z-]+)", told)}
    assert advised <= PARSERS["train"]._option_string_actions.keys()
    same = page.split("same name and meaning: `")[1].split("`.")[0].split()
    assert {flag[2:].replace("-", "_") for flag in same} <= {*all_fields()}
