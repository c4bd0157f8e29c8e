"""Recipes: their commands on the built-in corpus, and what they cost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fasttfm.cli import recipe as command
from fasttfm.cli.main import build_parser, main
from fasttfm.cli.recipe import RECIPES
from fasttfm.config.presets import preset_names
from fasttfm.data import datasets
from fasttfm.data.datasets import DATASETS, Texts
from fasttfm.system.children import PARENT


@pytest.fixture
def ran(monkeypatch) -> list:
    """The commands of a recipe, which are not run: (words, standard output). Each would end with the recipe."""
    commands = []

    def run(words, stdin, stdout, env):
        assert env[PARENT] == str(os.getpid())
        commands.append((words, stdout))
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(command, "run_to_end", run)
    return commands


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["multi30k", "paper-base-en-fr", "tensor2tensor-base-de-en"])
def test_a_dry_run_downloads_nothing(name, tmp_path, monkeypatch, capfd, ran):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "download", lambda *_, **options: pytest.fail("a download"))
    assert main(["recipe", name, "--dry-run"]) == 0
    assert "is not downloaded: the built-in demo corpus in" in capfd.readouterr().out
    prepare, train = (words for words, _ in ran[:2])
    prepare = prepare[prepare.index("prepare") :]
    texts = [Path(word) for word in prepare if word.endswith((".en", ".de"))]
    assert [text.is_file() for text in texts] == [True] * 4
    assert main([*prepare[:-1], str(tmp_path / "DATA")]) == 0
    assert f"--out runs/{name}-dry/model" in " ".join(train)


def test_json_is_the_score_alone_and_quiet_goes_to_every_command(tmp_path: Path, monkeypatch, capfd, ran):
    pair = tmp_path / "a", tmp_path / "b"
    texts = Texts(train=([pair[0]], [pair[1]]), valid=([], []), tests={"flickr2016": pair})
    (tmp_path / "a").write_text("x\n")
    monkeypatch.setattr(datasets, "fetch_dataset", lambda *args, **options: texts)
    (tmp_path / "data").mkdir()
    assert main(["recipe", "multi30k", "--work", str(tmp_path / "data"), "--json", "--quiet"]) == 0
    assert [(words[3], "--quiet" in words, "--json" in words) for words, _ in ran] == [
        ("prepare", True, False), ("train", True, False), ("translate", True, False), ("score", True, True)
    ]  # fmt: skip
    assert ran[0][1] is ran[1][1] is sys.stderr
    assert ran[3][1] is None, "the document is the command's output"
    assert capfd.readouterr().out == ""


def test_every_recipe_is_listed_and_its_commands_and_names_exist(capsys, ran, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, recipe in RECIPES.items():
        assert main(["recipe", name, "--dry-run"]) == 0
        for words, _ in ran[-4:]:
            build_parser([words[3]]).parse_args(words[3:])
        assert ("--compound-split" in ran[-1][0]) == bool(recipe.score)
        assert f"test.{recipe.test}" in DATASETS[recipe.dataset].parts
        assert recipe.preset in preset_names()
    capsys.readouterr()
    assert main(["recipe", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*RECIPES]


def test_an_estimate_multiplies_and_says_that_it_is_one(capsys):
    """100,000 updates of at most 25,000 target tokens, at 20,000 a second."""
    assert main(["recipe", "paper-base-en-de", "--estimate", "20000", "--price", "1.5"]) == 0
    told = capsys.readouterr().out
    hours = 100_000 * 25_000 / 20_000 / 3600
    assert told.startswith("fasttfm recipe: estimate: ")
    assert f"take {hours:,.1f} hours, {hours * 1.5:,.2f} at 1.5 an hour" in told
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert "| `paper-base-en-de` | 2,500 million |" in page
