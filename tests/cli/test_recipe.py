"""Recipes, run through all commands at a small size."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from fasttfm.cli import recipe as command
from fasttfm.cli.main import main
from fasttfm.cli.recipe import RECIPES
from fasttfm.config.presets import preset_names
from fasttfm.data import datasets
from fasttfm.data.datasets import DATASETS, Texts
from fasttfm.system.children import PARENT
from fasttfm.system.folders import replacing

SMALL = (
    "--d-model 32 --heads 2 --d-ff 64 --encoder-layers 1 --decoder-layers 1 --max-tokens 512 --workers 1 --device cpu"
)


def place(data_dir: Path, dataset: str, corpora: Path) -> None:
    """Write the first lines of real news as the downloaded text of a dataset."""
    with replacing(data_dir / dataset, "a test", "text of a dataset") as fresh:
        sizes = {"train": 500, "valid": 12, "test": 6}
        stems = {stem: (split := stem.partition(".")[0], sizes[split]) for stem in DATASETS[dataset].parts}
        for stem, (split, count) in stems.items():
            for language in DATASETS[dataset].languages:
                file = corpora / "wmt_news_ende" / f"{split}.{language}.gz"
                with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
                    text = "".join(line for line, _ in zip(lines, range(count)))
                (fresh.path / f"{stem}.{language}").write_text(text, encoding="utf-8")


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor2tensor-base-de-en", "paper-base-en-de"])
def test_a_dry_run_goes_through_every_command(name: str, corpora: Path, tmp_path: Path, capfd, monkeypatch):
    monkeypatch.setattr("fasttfm.system.children.subprocess", forked.SUBPROCESS)
    recipe = RECIPES[name]
    place(tmp_path / "data", recipe.dataset, corpora)
    words = ["recipe", name, "--dry-run", "--data-dir", str(tmp_path / "data"), "--work", str(tmp_path / "work")]
    assert main([*words, "--train", *SMALL.split(), "--max-update", "3"]) == 0
    said = capfd.readouterr().out
    for words in ("prepare --src", "train --preset", "translate ", "score --ref"):
        assert f"\n$ fasttfm {words}" in said
    assert "BLEU" in said
    assert ("compound" in said) == bool(recipe.score)
    target = DATASETS[recipe.dataset].languages[0 if recipe.reverse else 1]
    assert len((tmp_path / "work" / f"{recipe.test}.{target}").read_text().splitlines()) == 6


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


def test_every_recipe_is_listed_and_names_what_exists(capsys):
    for recipe in RECIPES.values():
        assert f"test.{recipe.test}" in DATASETS[recipe.dataset].parts
        assert recipe.preset in preset_names()
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
