"""What Hugging Face's datasets has saved becomes prepared data."""

import sys
from pathlib import Path

import pytest

from fasttfm.cli.main import main
from fasttfm.data.dataset_folder import text_of_folder
from fasttfm.data.demo import demo_pairs
from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError

datasets = pytest.importorskip("datasets", reason="datasets is not installed")


def saved(folder: Path, nested: bool = True, **sizes: int) -> tuple[Path, dict[str, list[tuple[str, str]]]]:
    """A DatasetDict on the disk, and its pairs by split."""
    pairs = demo_pairs()
    content = {split: [next(pairs) for _ in range(size)] for split, size in sizes.items()}
    dataset = datasets.DatasetDict()
    for split, rows in content.items():
        if nested:
            features = datasets.Features({"translation": datasets.Translation(languages=["en", "de"])})
            columns = {"translation": [{"en": en, "de": de} for en, de in rows]}
            dataset[split] = datasets.Dataset.from_dict(columns, features=features)
        else:
            columns = {"id": [*range(len(rows))], "en": [en for en, _ in rows], "de": [de for _, de in rows]}
            dataset[split] = datasets.Dataset.from_dict(columns)
    dataset.save_to_disk(str(folder))
    return folder, content


@pytest.mark.parametrize("nested", [True, False])
def test_a_saved_dataset_is_prepared(tmp_path: Path, capsys: pytest.CaptureFixture, nested: bool):
    folder, content = saved(tmp_path / "SAVED", nested, train=2100, validation=20, test=5)
    words = ["prepare", "--dataset-folder", str(folder), "--languages", "de", "en", "--vocab-size", "500"]
    words += ["--data-dir", str(tmp_path / "text"), "--out", str(tmp_path / "DATA")]
    assert main(words) == 0, capsys.readouterr().err
    data = PreparedData.open(tmp_path / "DATA")
    assert data.valid_source_text == [de for _, de in content["validation"]]
    assert data.valid_target_text == [en for en, _ in content["validation"]]
    assert len(data.train) == 2100
    last = data.target_tokenizer.decode(data.train.target(2099))
    assert last == content["train"][-1][0]
    assert (tmp_path / "text" / "SAVED" / "test.en").read_text().splitlines() == [en for en, _ in content["test"]]
    assert main(words) == 0
    assert "already holds this data" in capsys.readouterr().out


def test_line_breaks_and_missing_sentences_shift_no_line(tmp_path: Path):
    columns = {"a": ["one\ntwo", None, "three\r\n"], "b": ["x", "y", "z"]}
    rows = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict(train=rows, dev=rows).save_to_disk(str(tmp_path / "SAVED"))
    texts = text_of_folder(tmp_path / "SAVED", ("a", "b"), tmp_path / "text", say=lambda line: None)
    assert texts.train[0][0].read_text() == "one two\n\nthree  \n"
    assert texts.valid[1][0].read_text() == "x\ny\nz\n"
    assert texts.tests == {}


def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    folder, _ = saved(tmp_path / "SAVED", train=3, validation=3)
    one, _ = saved(tmp_path / "ONE", train=3)
    (tmp_path / "empty").mkdir()
    datasets.Dataset.from_dict({"en": ["a"], "de": ["b"]}).save_to_disk(str(tmp_path / "SPLIT"))
    for path, languages, message in (
        (folder, ("en", "fr"), "has no text fr: --languages may name two of de, en"),
        (one, ("en", "de"), "has no split validation or valid or dev among train"),
        (tmp_path / "SPLIT", ("en", "de"), "holds one split"),
        (tmp_path / "empty", ("en", "de"), "is not what datasets' save_to_disk"),
        (tmp_path / "nowhere", ("en", "de"), "is not what datasets' save_to_disk"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            text_of_folder(path, languages, tmp_path / "text", say=lambda line: None)
        assert "\n" not in str(raised.value)
    for words, message in (
        (["--dataset-folder", "X"], "--dataset-folder goes with --languages"),
        (
            ["--dataset-folder", "X", "--languages", "en", "de", "--dataset", "multi30k"],
            "--dataset and --dataset-folder do not go together",
        ),
        (["--dataset-folder", "X", "--languages", "en", "de", "--src", "f"], "--dataset-folder brings its own text"),
    ):
        assert main(["prepare", *words, "--out", str(tmp_path / "D")]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'^datasets is not installed: pip install "fasttfm\[datasets\]"'):
        text_of_folder(folder, ("en", "de"), tmp_path / "text")
