"""fairseq-train's flags in `fasttfm train`."""

from pathlib import Path

import pytest

from fasttfm.cli.fairseq_flags import ALIASES, ELSEWHERE
from fasttfm.cli.main import main
from fasttfm.config import all_fields

PAGE = (Path(__file__).parents[2] / "docs" / "from-fairseq.md").read_text(encoding="utf-8")


def dumped(capsys, *words):
    assert main(["train", "--preset", "iwslt14", *words, "--dump-config"]) == 0
    return capsys.readouterr().out


def test_what_differs_only_by_name_is_taken(capsys):
    theirs = ["--encoder-embed-dim", "256", "--decoder-embed-dim", "256", "--lr-scheduler", "inverse_sqrt"]
    theirs += ["--encoder-ffn-embed-dim", "512", "--activation-fn", "gelu", "--adam-betas", "(0.9, 0.997)"]
    ours = ["--d-model", "256", "--schedule", "inverse-sqrt", "--d-ff", "512", "--activation", "gelu"]
    assert dumped(capsys, *theirs) == dumped(capsys, *ours, "--adam-betas", "0.9,0.997")
    assert "d_model: 256" in dumped(capsys, *theirs)


def test_sides_that_differ_are_refused(capsys):
    assert main(["train", "--encoder-embed-dim", "256", "--decoder-embed-dim", "512", "--dump-config"]) == 2
    assert "--decoder-embed-dim 512: is --d-model here, which is 256 already" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--arch", "--fp16", "--share-all-embeddings"])
def test_what_has_no_counterpart_is_told(capsys, flag):
    assert main(["train", flag, *(["transformer"] if flag == "--arch" else [])]) == 2
    assert capsys.readouterr().err.strip() == f"fasttfm train: {flag} is fairseq's: {ELSEWHERE[flag]}"


def test_the_page_lists_all_and_names_what_exists():
    assert [flag for flags in (*ALIASES, *ELSEWHERE) for flag in flags.split() if f"| `{flag}` |" not in PAGE] == []
    assert {name for name in ALIASES.values() if name not in all_fields()} == {"out", "init_from"}
    same = PAGE.split("same name and meaning: `")[1].split("`.")[0].split()
    assert [flag for flag in same if flag[2:].replace("-", "_") not in all_fields()] == []
