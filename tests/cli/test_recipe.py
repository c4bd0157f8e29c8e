"""Recipes: every part of them, through the commands, at a size that takes seconds."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fasttfm.cli.main import main
from fasttfm.cli.recipe import RECIPES
from fasttfm.data.datasets import DATASETS
from fasttfm.folders import replacing
from fasttfm.presets import preset_names

SMALL = (
    "--d-model 32 --heads 2 --d-ff 64 --encoder-layers 1 --decoder-layers 1 --max-tokens 512 --workers 1 --device cpu"
)


def place(data_dir: Path, dataset: str, corpora: Path) -> None:
    """The text of a dataset as downloading would leave it, from real news: the first lines of each split."""
    languages = DATASETS[dataset].languages
    with replacing(data_dir / dataset, "a test") as fresh:
        stems = {f"train.{n}": ("train", 500) for n in range(1, len(DATASETS[dataset].train) + 1)}
        stems |= {"valid": ("valid", 12)} | {f"test.{name}": ("test", 6) for name in DATASETS[dataset].tests}
        for stem, (split, count) in stems.items():
            for language in languages:
                file = corpora / "wmt_news_ende" / f"{split}.{language}.gz"
                with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
                    text = "".join(line for line, _ in zip(lines, range(count)))
                (fresh.path / f"{stem}.{language}").write_text(text, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper-base-en-de", "tensor2tensor-base-de-en"])
def test_a_dry_run_goes_through_every_command(name: str, corpora: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    recipe = RECIPES[name]
    place(tmp_path / "data", recipe.dataset, corpora)
    words = ["recipe", name, "--dry-run", "--data-dir", str(tmp_path / "data"), "--work", str(tmp_path / "work")]
    assert main([*words, "--train", *SMALL.split(), "--max-update", "3"]) == 0
    said = capfd.readouterr().out
    for command in ("prepare --src", "train --preset", "translate ", "score --ref"):
        assert f"\n$ fasttfm {command}" in said
    assert "BLEU" in said
    assert ("compound" in said) == bool(recipe.score)
    target = DATASETS[recipe.dataset].languages[0 if recipe.reverse else 1]
    assert len((tmp_path / "work" / f"{recipe.test}.{target}").read_text().splitlines()) == 6


def test_every_recipe_names_what_exists():
    for recipe in RECIPES.values():
        assert recipe.test in DATASETS[recipe.dataset].tests
        assert recipe.preset in preset_names()


def test_an_unknown_recipe_and_a_failing_command_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture):
    assert main(["recipe", "wmt99"]) == 2
    assert "fasttfm recipe: wmt99: one of paper-base-en-de" in capfd.readouterr().err
