"""fairseq-train's flags in `fasttfm train`."""

import re
from pathlib import Path

import pytest

from fasttfm.cli.main import build_parser, main
from fasttfm.cli.train import _FAIRSEQ
from fasttfm.config import all_fields

PAGE = (Path(__file__).parents[2] / "docs" / "from-fairseq.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("flag", ["--arch", "--fp16", "--share-all-embeddings", "--save-dir"])
def test_fairseq_flags_name_their_replacement(capsys, flag):
    assert main(["train", flag, *(["transformer"] if flag == "--arch" else [])]) == 2
    assert capsys.readouterr().err.strip() == f"fasttfm train: {flag} is fairseq's: {_FAIRSEQ[flag]}"


def test_the_page_lists_all_and_names_what_exists():
    assert [flag for flags in _FAIRSEQ for flag in flags.split() if f"| `{flag}` |" not in PAGE] == []
    known = build_parser(["train"])._subparsers._group_actions[0].choices["train"]._option_string_actions
    assert [
        told for told in _FAIRSEQ.values() for flag in re.findall(r"give (--[a-z-]+)", told) if flag not in known
    ] == []
    same = PAGE.split("same name and meaning: `")[1].split("`.")[0].split()
    assert [flag for flag in same if flag[2:].replace("-", "_") not in all_fields()] == []
